"""Starting Ray: one line for what it has against it; our handler of SIGTERM survives it, and other users of the machine
can neither enter its directory nor read its token.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.node import Node
from ray._private.parameter import RayParams

from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster.ray_cluster import OwnRay, protect_token, ray_cluster, ray_directory

# covers: C10


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Arguments that ``ray.init`` was called with; it starts nothing."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr("ray.init", lambda **options: calls.append(options))
    monkeypatch.setattr("ray.shutdown", lambda: calls.append({"shutdown": True}))
    return calls


async def test_a_cluster_of_our_own_is_never_somebody_elses(calls: list[dict[str, object]]) -> None:
    own = OwnRay()
    async with ray_cluster(None, {"A": "1"}, own):
        assert calls[0]["address"] == "local"  # without it Ray joins what `ray start` left behind
        assert calls[0]["runtime_env"] == {"env_vars": {"A": "1"}}
    assert calls[-1] == {"shutdown": True}


async def test_a_cluster_of_our_own_starts_no_service_that_no_run_calls(
    calls: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    for name in ("start_gcs_server", "start_monitor", "start_api_server", "start_log_monitor"):
        monkeypatch.setattr(Node, name, lambda self, name=name, **_: started.append(name))
    for name in ("get_gcs_client", "_write_cluster_info_to_kv"):
        monkeypatch.setattr(Node, name, lambda self: "done")
    node = object.__new__(Node)
    vars(node).update(_gcs_address=None, _gcs_client=None, _logs_dir="", _ray_params=RayParams(include_dashboard=False))
    async with ray_cluster(None, {}, OwnRay()):
        node.start_head_processes()
        node.start_log_monitor()
    assert started == ["start_gcs_server"]
    assert "self.start_log_monitor()" in inspect.getsource(Node.start_ray_processes)


async def test_joining_asks_for_no_resources(calls: list[dict[str, object]]) -> None:
    async with ray_cluster("10.0.0.1:6379", {}, None):
        assert calls[0]["address"] == "10.0.0.1:6379"
        assert "object_store_memory" not in calls[0]


@pytest.mark.parametrize(
    ("address", "message"),
    [(None, "Ray cannot start on this machine: no memory left"), ("h:1", "--ray-address h:1: no memory left")],
)
async def test_the_reason_of_ray_is_one_line(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, object]], address: str | None, message: str
) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("no memory\n  left")

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        async with ray_cluster(address, {}, None):
            pass
    assert calls == [{"shutdown": True}]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The SIGTERMs that reached Python."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


async def test_a_handler_that_ray_installs_in_c_is_replaced_again(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, object]], heard: list[int]
) -> None:
    monkeypatch.setattr("ray.init", lambda **_: ctypes.CDLL(None).signal(int(signal.SIGTERM), None))  # the default
    async with ray_cluster(None, {}, None):
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
        assert heard == [signal.SIGTERM]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / f"ray-{os.getuid()}"


def test_it_is_made_for_this_user_alone(place: Path) -> None:
    # covers: C13
    assert ray_directory() == place / "r"
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    ray_directory()
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_link_or_file_that_somebody_put_there_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    place.symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match="found another's: remove it, or name another place by RAY_TMPDIR"):
        ray_directory()
    place.unlink()
    place.write_text("")
    with pytest.raises(ConfigurationError, match="RAY_TMPDIR"):
        ray_directory()


def test_another_users_directory_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.with_name("ray-12345").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigurationError, match="found another's"):
        ray_directory()


def test_the_token_is_for_this_user_alone(tmp_path: Path) -> None:
    protect_token()  # there is none
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    protect_token()
    assert token.stat().st_mode & 0o777 == 0o600


async def test_a_run_starts_ray_there_and_closes_its_token(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C13
    token = tmp_path / ".ray" / "auth_token"

    def init(**options: object) -> None:
        assert options["_temp_dir"] == str(place / "r")
        token.parent.mkdir()
        token.write_text("secret")
        token.chmod(0o644)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    async with ray_cluster(None, {}, OwnRay()):
        assert token.stat().st_mode & 0o777 == 0o600
