"""A process that Ray killed, or lost, is one line, whatever Ray has to say about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from miles_async.engines.kind import ServerSpec
from miles_async.engines.placement import RayServers, _RayServer, _RemoteServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.errors import EngineError, EngineStartError, ProcessLostError
from miles_async.rollout.actor import _result
from miles_async.runtime.cluster.actor_link import ActorLink, why_gone
from miles_async.trainer.rank_actors import cause_of

# covers: C10

KILLED = OutOfMemoryError(
    "Task was killed due to the node running low on memory.\n"
    "Memory on the node (IP: 10.0.0.1, ID: 99) where the task (actor ID: 7) was running was 15.3GB / 16.0GB (0.956), "
    "which exceeds the memory usage threshold of 0.95. Ray killed this worker (ID: 8) because it was the most recently "
    "scheduled task; to see more information about memory usage on this node, use `ray logs raylet.out`.\n"
    "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io\n"
)


def test_rays_memory_monitor_is_named_with_what_to_do() -> None:
    line = why_gone(KILLED)
    assert "\n" not in line
    assert "ran out of memory (fewer --rollout-num-gpus or --actor-num-gpus-per-node" in line
    assert "15.3GB / 16.0GB" in line
    assert "documentation" not in line


def failing(error: RayError) -> Any:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


@pytest.mark.parametrize("error", [KILLED, ActorDiedError()])
async def test_everyone_who_calls_an_actor_tells_it(error: RayError) -> None:
    with pytest.raises(ProcessLostError, match=r"the rollout manager's process died: [^\n]*$"):
        await _result(ActorLink("manager"), lambda _: failing(error))
    trainer = cause_of({1: error})
    assert isinstance(trainer, ProcessLostError)
    assert str(trainer).startswith("trainer rank 1 died: ")
    assert "\n" not in str(trainer)
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32")
    server = _RayServer(RayServers(SGLANG, spec), 0, 0)

    class Method:
        def remote(self, *arguments: object) -> Any:
            return failing(error)

    class Actor:
        perform = Method()

    server._parts = [_RemoteServer(Actor(), ActorLink("engine"))]
    with pytest.raises(EngineError, match="its actor is gone"):
        await server.on_host(len, 0)
    assert (await server.wait_exit()).startswith("its actor is gone")


async def test_an_engine_that_ray_kills_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Actor:
        def options(self, **_: object) -> Actor:
            return self

        def remote(self, *_: object) -> Any:
            return self

        @property
        def perform(self) -> Any:
            return type("Method", (), {"remote": lambda *_: failing(KILLED)})()

    monkeypatch.setattr("ray.remote", lambda _: Actor())
    node = {"Alive": True, "NodeID": "0" * 56, "NodeManagerAddress": "10.0.0.1", "Labels": {}, "Resources": {}}
    monkeypatch.setattr("ray.nodes", lambda: [node])
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32")
    server = _RayServer(RayServers(SGLANG, spec), 0, 0)
    with pytest.raises(EngineStartError, match="ran out of memory"):
        await server.start()
