"""Each fake is held against the real thing: same methods, same parameters, and, for the fleet, same behaviour.

``fakes.fake_engine`` has its own contract test, against a real SGLang server (integration/test_engines_real.py).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.load import Loads
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.rollout.concurrency import EngineLoads
from miles_async.rollout.manager import RolloutManager
from miles_async.seams import EngineErrors, EngineFleet, InferenceServer, RolloutSide, TrainerSide
from miles_async.trainer.ranks import TrainerRanks
from miles_async.types import Incarnation, TensorMeta
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_fleet import FakeRouter, FakeServer
from tests.fakes.fake_sides import FakeEngineLoads, FakeFleet, FakeRollout, FakeTrainer


def methods(protocol: type) -> list[str]:
    return [name for name, member in vars(protocol).items() if inspect.isfunction(member) and not name.startswith("_")]


def parameters(owner: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(owner, name)).parameters)


@pytest.mark.parametrize(
    ("protocol", "real", "fake"),
    [
        (EngineFleet, Fleet, FakeFleet),
        (TrainerSide, TrainerRanks, FakeTrainer),
        (RolloutSide, RolloutManager, FakeRollout),
        (EngineLoads, Loads, FakeEngineLoads),
    ],
)
def test_real_and_fake_have_the_methods_of_the_protocol(protocol: type, real: type, fake: type) -> None:
    for name in methods(protocol):
        expected = parameters(protocol, name)
        assert parameters(real, name) == expected, f"{real.__name__}.{name}"
        assert parameters(fake, name) == expected, f"{fake.__name__}.{name}"
        assert inspect.iscoroutinefunction(getattr(real, name)), f"{real.__name__}.{name}"
        assert inspect.iscoroutinefunction(getattr(fake, name)), f"{fake.__name__}.{name}"


@asynccontextmanager
async def real_fleet(num_engines: int) -> AsyncIterator[Fleet]:
    """The real fleet and its HTTP calls; only the servers and the router process are fakes."""
    registry, http = EngineRegistry(), Http()
    router = FakeRouter(registry)
    group = EngineGroup(engines=num_engines, launch=lambda index, _: FakeServer(FakeEngine()))
    supervisor = EngineSupervisor(registry, router, SGLangServer(http), [group])
    await router.start()
    await supervisor.start()
    try:
        yield Fleet(registry, supervisor, SGLangServer(http), Traffic())
    finally:
        await supervisor.stop()
        await http.close()


@asynccontextmanager
async def fake_fleet(num_engines: int) -> AsyncIterator[FakeFleet]:
    yield FakeFleet([], joining=[f"engine-{index}" for index in range(num_engines)])


async def receive_buckets(fleet: Fleet, engines: Sequence[Incarnation], version: int) -> list[EngineErrors]:
    bucket = (TensorMeta("w", "float32", (2,)),)
    return [
        await fleet.call(engines, InferenceServer.begin_update),
        await fleet.call(engines, InferenceServer.receive_bucket, f"group-{version}", bucket, version),
        await fleet.call(engines, InferenceServer.end_update),
    ]


async def receive_stream(fleet: Fleet, engines: Sequence[Incarnation], version: int) -> list[EngineErrors]:
    errors = await fleet.call(engines, InferenceServer.receive_stream, [f"group-{version}"], version)
    await fleet.stream_sent(engines, broken=False)
    return [errors]


@pytest.mark.parametrize("make", [real_fleet, fake_fleet])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("bucketwise", [False, True])
async def test_a_publication_looks_the_same_from_outside(
    make: Callable[[int], AbstractAsyncContextManager[Fleet | FakeFleet]], mode: str, bucketwise: bool
) -> None:
    async with make(2) as fleet:
        engines = (await fleet.members()).joining
        assert engines == (Incarnation("engine-0", 0), Incarnation("engine-1", 0))
        for version in (0, 1):
            for errors in (
                await fleet.call(engines, InferenceServer.join_group, 1, f"group-{version}", "127.0.0.1", 1, 3, "gloo"),
                await fleet.call(engines, InferenceServer.pause, mode),
                *await (receive_buckets if bucketwise else receive_stream)(fleet, engines, version),
                await fleet.call(engines, InferenceServer.resume),
            ):
                assert errors == dict.fromkeys(engines)
            scores = await fleet.call(engines, InferenceServer.score, (1, 2, 3))
            assert {engine: score.weight_version for engine, score in scores.items()} == dict.fromkeys(
                engines, str(version)
            )
            assert all(len(score.logprobs) == 2 for score in scores.values())
            assert await fleet.admit(engines, version) == dict.fromkeys(engines)
            assert (await fleet.members()).serving == engines
        await fleet.fence([engines[1]], "test")
        members = await fleet.members()
        assert members.serving == engines[:1]
        assert members.joining == ()
        errors = await fleet.call(engines, InferenceServer.begin_update)
        assert errors[engines[0]] is None
        assert "engine-1 was lost" in str(errors[engines[1]])
