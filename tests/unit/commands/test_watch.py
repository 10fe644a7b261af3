"""``miles-async watch``: the addresses that it prints, and the keys that they have."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_async.commands.watch import KEY_VARIABLE, WRITE_KEY_VARIABLE, watch
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.keys import Secret
from miles_async.watch import server
from tests.unit.watch.run_files import write_finished_run

Served = tuple[Secret, Secret | None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Served]]:
    """Runs the command without its server; returns what it printed and the keys."""
    served: list[Served] = []

    def make_server(_: object, key: Secret, write_key: Secret | None) -> SimpleNamespace:
        def run(sockets: list[socket.socket]) -> None:
            assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]
            served.append((key, write_key))

        return SimpleNamespace(run=run)

    monkeypatch.setattr(server, "make_server", make_server)
    run_dir = write_finished_run(tmp_path / "run")

    def run(*words: str) -> tuple[str, Served]:
        shown: list[str] = []
        assert watch([str(run_dir), "--port", "0", *words], shown.append) == 0
        return "".join(shown), served[-1]

    return run


def test_without_write_there_is_one_key(start: Callable[..., tuple[str, Served]]) -> None:
    shown, (key, write_key) = start()
    assert re.findall(r"#key=(\S+)", shown) == [key.reveal()]
    assert write_key is None


def test_with_write_there_are_two(start: Callable[..., tuple[str, Served]], monkeypatch: pytest.MonkeyPatch) -> None:
    shown, (key, write_key) = start("--write")
    assert write_key is not None
    assert re.findall(r"#key=(\S+)", shown) == [key.reveal(), write_key.reveal()]
    assert key.reveal() != write_key.reveal()
    monkeypatch.setenv(KEY_VARIABLE, "read")
    monkeypatch.setenv(WRITE_KEY_VARIABLE, "write")
    assert re.findall(r"#key=(\S+)", start("--write")[0]) == ["read", "write"]
    monkeypatch.setenv(WRITE_KEY_VARIABLE, "read")
    with pytest.raises(ConfigurationError, match="expected two keys, found the same"):
        start("--write")
