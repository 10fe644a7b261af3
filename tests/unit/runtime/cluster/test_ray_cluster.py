"""Starting Ray: one line for what it has against it, and our handler of SIGTERM survives it."""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
from collections.abc import Iterator

import pytest
from ray._private.node import Node
from ray._private.parameter import RayParams

from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster.ray_cluster import OwnRay, ray_cluster

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
