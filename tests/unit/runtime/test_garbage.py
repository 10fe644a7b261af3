"""A process with an event loop looks rarely for garbage, and never at what it started with."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from miles_async.rollout.actor import RolloutActor, RolloutParts
from miles_async.runtime.cluster.actor_link import ActorLink
from miles_async.runtime.garbage import THRESHOLDS, rare_collections
from tests.fakes.fake_sides import FakeFleet, FakeRollout


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def test_the_rollout_process_settles_when_its_parts_are_there() -> None:  # covers: C10
    gc.unfreeze()  # what there was before tests began (tests/conftest.py)
    seen: list[int] = []

    async def build() -> RolloutParts:
        seen.append(gc.get_freeze_count())
        return RolloutParts(manager=FakeRollout([]), fleet=FakeFleet([]))

    await ActorLink("manager").call(RolloutActor(build).start)
    assert seen == [0]
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == THRESHOLDS


def test_a_simulation_leaves_the_collector_as_it_was() -> None:
    gc.set_threshold(500, 5, 5)
    with rare_collections():
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == (500, 5, 5)
