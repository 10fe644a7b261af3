"""An engine on several nodes is one: its parts start, end and are stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray.exceptions

from miles_async.engines.kind import EngineKind, ServerHandle, ServerSpec
from miles_async.engines.placement import EnginePlace, RayServers
from miles_async.errors import EngineStartError
from miles_async.weights.transports.host_files import find_place

NODES = [
    {"Alive": True, "NodeID": name * 56, "NodeManagerAddress": f"10.0.0.{index}", "Labels": {}, "Resources": {}}
    for index, name in enumerate("abc")
]
KIND = EngineKind(name="none", command=None, environment=None, is_up=None, calls=None)
SPEC = ServerSpec(model_path="m", device="cpu", dtype="float32", tensor_parallel_size=4, nodes=2)


class Part:
    """The actor of one node."""

    def __init__(self, engine: Engine, node: int, place: str) -> None:
        self.engine, self.node, self.place = engine, node, place
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.awaited = asyncio.Event()  # somebody waits for its end

    @property
    def perform(self) -> object:
        return self

    async def remote(self, _: object, method: Callable[..., object], *arguments: object) -> object:
        self.engine.calls.append((self.node, method.__name__, arguments))
        match method.__name__:
            case "open_rendezvous":
                return "10.0.0.0", 7
            case "start":
                await self.engine.up.wait()
                return "http://10.0.0.0:1"
            case "host_directory":
                return self.engine.paths[self.node]
            case "on_host":
                return self.engine.answers[self.node]
            case "wait_exit":
                self.awaited.set()
                return await asyncio.shield(self.ended)
        return None


class Engine:
    """Its actors, as Ray would make them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[Part] = []
        self.gpus: list[tuple[str, ...]] = []
        self.killed: list[int] = []
        self.calls: list[tuple[int, str, tuple[object, ...]]] = []
        self.up = asyncio.Event()
        self.paths: list[Path | None] = [Path("/dev/shm/a")] * 2
        self.answers: list[object] = [7, 8]
        monkeypatch.setattr("ray.nodes", lambda: NODES)
        monkeypatch.setattr("ray.remote", lambda _: self)
        monkeypatch.setattr("ray.kill", lambda part, no_restart: self.killed.append(part.node))

    def options(self, *, scheduling_strategy: Any, num_gpus: int, **_: object) -> Engine:
        self.place, self.num_gpus = scheduling_strategy.node_id[0], num_gpus
        return self

    def remote(self, *arguments: Any) -> Part:
        self.gpus.append(arguments[1].gpus)
        self.parts.append(Part(self, arguments[-1], self.place))
        return self.parts[-1]

    def handle(self) -> ServerHandle:
        return RayServers(KIND, SPEC)(1, 0)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


async def test_all_parts_meet_where_the_first_one_says_and_it_alone_serves(engine: Engine) -> None:
    # covers: A6
    engine.up.set()
    assert await engine.handle().start() == "http://10.0.0.0:1"
    assert [part.place for part in engine.parts] == ["c", "a"]  # engine 0 has a and b
    assert (0, "open_rendezvous", ()) == engine.calls[0]
    assert engine.calls.index((1, "follow", (("10.0.0.0", 7),))) < engine.calls.index((0, "start", (("10.0.0.0", 7),)))


async def test_each_part_has_the_gpus_of_the_ranks_of_its_node(engine: Engine) -> None:
    engine.up.set()
    place = EnginePlace(node_ids=("c" * 56, "b" * 56), gpus=(("0", "1"), ("3", "2")))
    await RayServers(KIND, msgspec.structs.replace(SPEC, device="cuda"), places=[place])(0, 0).start()
    assert [part.place for part in engine.parts] == ["c", "b"]
    assert engine.gpus == [("0", "1"), ("3", "2")]
    assert engine.num_gpus == 0  # the ranks hold them


async def test_files_are_brought_to_each_node_at_one_path(engine: Engine) -> None:
    engine.up.set()
    handle = engine.handle()
    await handle.start()
    assert await handle.on_host(find_place, 100) == 7
    directories = [(node, arguments) for node, name, arguments in engine.calls if name == "host_directory"]
    assert directories == [(0, (100,)), (1, (100, Path("/dev/shm/a")))]
    assert sorted(node for node, name, _ in engine.calls if name == "on_host") == [0, 1]
    engine.answers = [7, None]
    assert await handle.on_host(find_place, 100) is None  # one node lacks it


async def test_files_are_brought_once_to_two_parts_of_one_machine(engine: Engine) -> None:
    engine.up.set()
    engine.paths[1] = None
    handle = engine.handle()
    await handle.start()
    assert await handle.on_host(find_place, 100) == 7
    assert [node for node, name, _ in engine.calls if name == "on_host"] == [0]


async def test_a_part_that_ends_while_the_engine_starts_fails_the_start(engine: Engine) -> None:
    # covers: C10
    handle = engine.handle()
    starting = asyncio.ensure_future(handle.start())
    while len(engine.parts) < 2:  # noqa: ASYNC110  (they are made by what is tested)
        await asyncio.sleep(0)
    await engine.parts[1].awaited.wait()
    engine.parts[1].ended.set_result("out of memory")
    with pytest.raises(EngineStartError, match="out of memory"):
        await starting
    await handle.stop()
    assert sorted(engine.killed) == [0, 1]


@pytest.mark.parametrize("node", [0, 1])
async def test_the_end_of_any_part_is_the_end_of_the_engine(engine: Engine, node: int) -> None:
    # covers: C8
    engine.up.set()
    handle = engine.handle()
    await handle.start()
    waiting = asyncio.ensure_future(handle.wait_exit())
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.parts[node].ended.set_exception(ray.exceptions.RayActorError())
    assert (await waiting).startswith("its actor is gone")
    await handle.stop()
    assert sorted(engine.killed) == [0, 1]
    await handle.stop()
    assert sorted(engine.killed) == [0, 1]
