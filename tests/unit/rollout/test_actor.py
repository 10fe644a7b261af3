"""Stand-ins of the rollout actor's parts have every method of the part's protocol, and no other."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pytest

from miles_async.errors import ConfigurationError
from miles_async.rollout.actor import RolloutActor, RolloutParts, stand_in
from miles_async.runtime import garbage
from miles_async.runtime.actor_link import ActorLink
from miles_async.seams import EngineFleet, RolloutSide
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

    actor, link = RolloutActor(build), ActorLink("manager")
    await link.call(actor.start)

    async def forward(method: str, arguments: tuple[object, ...], named: Mapping[str, object]) -> object:
        return await link.call(lambda call: actor.call(call, "manager", method, *arguments, **named))

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
