"""Stand-ins of the rollout actor's parts have every method of the part's protocol, and no other."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import ray

from miles_async.errors import ConfigurationError, ProcessLostError
from miles_async.rollout import actor
from miles_async.rollout.actor import RolloutActor, RolloutParts, RolloutProcess, stand_in
from miles_async.runtime import garbage
from miles_async.runtime.cluster.actor_link import ActorLink
from miles_async.seams import EngineFleet, RolloutSide
from miles_async.simulation.virtual_time import run_in_virtual_time
from tests.fakes.fake_sides import FakeFleet, FakeRollout


@pytest.fixture(autouse=True)
def _garbage_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "settle", lambda: None)


class Rollout(FakeRollout):
    async def scale(self, group: str, engines: int) -> None:
        raise ConfigurationError(f"no group {group} for {engines} engines")


async def remote_manager() -> RolloutSide:
    async def build() -> RolloutParts:
        return RolloutParts(manager=Rollout([]), fleet=FakeFleet([]))

    hosting, link = RolloutActor(build), ActorLink("manager")
    await link.call(hosting.start)

    async def forward(method: str, *arguments: object, **named: object) -> object:
        return await link.call(lambda call: hosting.call(call, "manager", method, *arguments, **named))

    return stand_in(RolloutSide, forward)


async def test_calls_arrive_and_answers_and_errors_come_back() -> None:
    manager = await remote_manager()
    batch = await manager.next_batch(target_version=3)
    assert batch.target_version == 3
    assert await manager.engines() == "no engines"
    with pytest.raises(ConfigurationError, match="no group judge for 2 engines"):
        await manager.scale("judge", 2)


async def test_a_stand_in_has_only_methods_of_its_protocol() -> None:
    manager = await remote_manager()
    assert not hasattr(manager, "batches")  # an attribute of the part
    with pytest.raises(AttributeError, match="shutdown"):
        await manager.shutdown()  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", [RolloutSide, EngineFleet])
def test_every_method_of_a_remote_protocol_is_a_coroutine(protocol: type) -> None:
    methods = inspect.getmembers(protocol, inspect.isfunction)
    public = [function for name, function in methods if not name.startswith("_")]
    assert public
    assert all(map(inspect.iscoroutinefunction, public))


class BlockedRay:
    """Ray, as far as one actor needs it, in this process; the actor's event loop can be blocked."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.blocked = False

    def get_runtime_context(self) -> object:
        return SimpleNamespace(get_node_id=lambda: "node")

    def remote(self, kind: type[RolloutActor]) -> object:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: self._handle(kind(*given))))

    def _handle(self, hosted: RolloutActor) -> object:
        def remote(name: str) -> object:
            async def call(*arguments: object, **named: object) -> object:
                await asyncio.sleep(1e9 if self.blocked else 0.0)
                return await getattr(hosted, name)(*arguments, **named)

            return SimpleNamespace(remote=call)

        return SimpleNamespace(start=remote("start"), call=remote("call"), ping=remote("ping"))


def test_an_event_loop_that_is_blocked_for_good_is_told_and_a_long_start_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # covers: C10
    here = BlockedRay()
    monkeypatch.setattr(actor, "ray", here)
    monkeypatch.setattr("ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy", lambda *_, **__: None)

    async def build() -> RolloutParts:
        here.blocked = True
        await asyncio.sleep(1000.0)
        here.blocked = False
        return RolloutParts(manager=Rollout([]), fleet=FakeFleet([]))

    async def story() -> None:
        process = RolloutProcess(build, patience=60.0)
        await process.start()
        assert await process.manager.engines() == "no engines"
        here.blocked = True
        with pytest.raises(ProcessLostError, match="the rollout manager's process was out of reach for 60 s"):
            await process.manager.engines()

    run_in_virtual_time(story(), limit_seconds=10_000)
