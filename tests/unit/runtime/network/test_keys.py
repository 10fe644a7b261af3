"""Keys of the run's doors: made by chance, hidden from logs and dumps, compared in constant time."""

from __future__ import annotations

import hmac
import json
import pickle
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
import structlog

from miles_async.engines.kind import ServerSpec
from miles_async.errors import ConfigurationError
from miles_async.observability.logs import configure_logging
from miles_async.runtime.network.keys import (
    EngineKeys,
    Secret,
    make_run_keys,
    require_keys,
    take_engine_keys,
    take_session_keys,
    without_keys,
)
from tests.fakes.keys import KEYS, OTHER_KEYS


def test_every_run_has_keys_of_its_own() -> None:
    keys = [make_run_keys({}) for _ in range(2)]
    texts = {key.reveal() for run in keys for door in (run.engines, run.sessions) for key in asdict(door).values()}
    assert len(texts) == 8
    assert min(map(len, texts)) >= 43  # 32 random bytes


def test_a_key_opens_for_itself_only() -> None:
    key, other = KEYS.engines.api, OTHER_KEYS.engines.api
    assert key.opens_for(f"Bearer {key.reveal()}")
    assert key.opens_for(f"bearer {key.reveal()}")  # the scheme's case is free (RFC 9110)
    for refused in (
        None,
        "",
        key.reveal(),
        "Bearer ",
        f"Bearer {other.reveal()}",
        f"Basic {key.reveal()}",
        "Bearer \udcff",
    ):
        assert not key.opens_for(refused)
    assert not key.opens_for(f"Bearer {key.reveal()[:-1]}")


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)))
    Secret("ours").matches("theirs")
    assert compared == [(b"ours", b"theirs")]


@pytest.mark.usefixtures("restored_logging")
def test_a_key_is_not_shown(tmp_path: Path) -> None:
    text = KEYS.engines.admin.reveal()
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32", keys=KEYS.engines)
    log_file = configure_logging(tmp_path, "debug", console=False)
    log = structlog.get_logger("test")
    log.info("event", keys=KEYS, key=KEYS.engines.admin, spec=spec)
    log.info(f"{KEYS} {KEYS.engines.admin} {spec!r}")
    try:
        raise ValueError(KEYS.engines.admin)
    except ValueError:
        log.exception("failed")
    assert "Secret(hidden)" in log_file.read_text()
    for shown in (log_file.read_text(), f"{KEYS!r} {spec}", json.dumps(asdict(KEYS), default=str)):
        assert text not in shown
    with pytest.raises(TypeError):
        msgspec.json.encode(spec)  # and so never part of a configuration that is written


def test_keys_travel_to_actors() -> None:
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32", keys=KEYS.engines)
    assert pickle.loads(pickle.dumps(spec)).keys == KEYS.engines
    assert KEYS.engines != OTHER_KEYS.engines


def test_a_process_takes_its_keys_out_of_its_environment() -> None:
    environment = {"PATH": "/bin", **KEYS.engines.environment(), **KEYS.sessions.environment()}
    assert without_keys(environment) == {"PATH": "/bin"}
    assert take_engine_keys(environment) == KEYS.engines
    assert take_session_keys(environment) == KEYS.sessions
    assert environment == {"PATH": "/bin"}
    assert take_engine_keys(environment) is None


def test_keys_of_servers_that_others_started_come_from_the_environment() -> None:
    both = make_run_keys({"MILES_ASYNC_API_KEY": "a", "MILES_ASYNC_ADMIN_KEY": "b"})
    assert both.engines == EngineKeys(api=Secret("a"), admin=Secret("b"))
    assert make_run_keys({"MILES_ASYNC_API_KEY": "a"}).engines == EngineKeys(api=Secret("a"), admin=Secret("a"))
    assert make_run_keys({"MILES_ASYNC_API_KEY": ""}).engines.api.reveal()


def test_a_door_to_the_network_needs_keys() -> None:
    require_keys("127.0.0.1", None)
    require_keys("node-7", KEYS.engines)
    with pytest.raises(ConfigurationError, match="node-7"):
        require_keys("node-7", None)
