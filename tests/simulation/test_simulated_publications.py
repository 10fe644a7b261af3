"""Publications to engines that restart or hang at any moment, under virtual time: nobody serves what it did not get,
and a hang costs two deadlines at most.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, CoroutineType
from typing import Any

import numpy as np
import pytest

from miles_async.arguments import WeightsArguments
from miles_async.simulation.run import quiet_logs
from miles_async.simulation.virtual_time import VirtualTimeLoop, run_in_virtual_time
from miles_async.weights.publisher import ADMISSION_SECONDS, WeightPublisher
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.object_store_rank import ObjectStoreSender
from tests.fakes.fake_sides import publish
from tests.fakes.publishers import publisher_of
from tests.fakes.weight_servers import BroadcastingTrainer, World
from tests.unit.weights.transports.test_local_files import FileTrainer

UNVERIFIED = WeightsArguments(verify_weights="off")  # so that nothing else could find out
STEP = UNVERIFIED.step_timeout


Scenario = Callable[[World, WeightPublisher], Awaitable[None]]


def play(
    engines: int,
    scenario: Scenario,
    *,
    trainer: BroadcastingTrainer | None = None,
    patience: float | None = UNVERIFIED.group_timeout,
    bucketwise: bool = False,
    seconds: float = 10_000,
) -> None:
    """With ``distributed``."""

    async def main() -> None:
        sending = trainer or BroadcastingTrainer(patience=UNVERIFIED.group_timeout)
        world = sending.world = World(engines, sending.contents, step_timeout=STEP, bucketwise=bucketwise)
        world.patience = patience
        async with world:
            await scenario(world, publisher_of(sending, world.fleet, UNVERIFIED))

    with quiet_logs():
        run_in_virtual_time(main(), limit_seconds=seconds)


# ----------------------------------------------------------------------------------------------- restarts
def restarted_at(iteration: int, make: Callable[[], tuple[World, WeightPublisher]]) -> int:
    """Publish twice; engine-0 dies in that iteration of the second time and is up again at once. How many there are."""
    iterations = 0

    async def main() -> None:
        nonlocal iterations
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        world, publisher = make()
        world.start_seconds = 0.0
        world.seconds_per_call = {"engine-0": 0.01, "engine-1": 0.05}
        async with world:
            await publish(publisher, 0)
            started = loop.iterations
            loop.at_iteration(started + iteration, lambda: world.servers["engine-0"].die())
            await publish(publisher, 1)
            iterations = loop.iterations - started
            while world.serving() != {"engine-0", "engine-1"}:
                await world.supervisor.wait_for_joining()
                await publisher.repair()

    with quiet_logs():
        run_in_virtual_time(main(), limit_seconds=1000)
    return iterations


def by_broadcast() -> tuple[World, WeightPublisher]:
    trainer = BroadcastingTrainer(patience=UNVERIFIED.group_timeout)
    world = trainer.world = World(2, trainer.contents, step_timeout=STEP)
    return world, publisher_of(trainer, world.fleet, UNVERIFIED)


@pytest.fixture
def by_delta(tmp_path: Path) -> Iterator[Callable[[], tuple[World, WeightPublisher]]]:
    senders = []

    def make() -> tuple[World, WeightPublisher]:
        senders.append(ObjectStoreSender(StagingOptions(parent=tmp_path, bucket_bytes=3200, delta="xor"), put=np.array))
        trainer = FileTrainer([], senders[-1])

        def contents(version: int) -> Mapping[str, bytes]:
            return {name: tensor.numpy().tobytes() for name, tensor in trainer.weights(version).items()}

        world = World(2, contents, step_timeout=STEP)
        arguments = WeightsArguments(verify_weights="off", weight_transport="object_store", weight_delta="xor")
        return world, publisher_of(trainer, world.fleet, arguments)

    yield make
    for sender in senders:
        sender.close()


@pytest.mark.timeout(120)
def test_an_engine_that_restarts_at_any_await_point_of_a_broadcast_never_serves_a_part_of_it() -> None:
    # covers: C8
    iterations = restarted_at(10**6, by_broadcast)
    assert iterations > 50
    for iteration in range(1, iterations + 1):
        restarted_at(iteration, by_broadcast)


@pytest.mark.timeout(120)
def test_an_engine_that_restarts_at_any_await_point_never_serves_changes_alone(
    by_delta: Callable[[], tuple[World, WeightPublisher]],
) -> None:
    # covers: C8
    iterations = restarted_at(10**6, by_delta)
    assert iterations > 30
    for iteration in range(1, iterations + 1):
        restarted_at(iteration, by_delta)


# -------------------------------------------------------------------------------------------------- hangs
STEPS = (
    "/server_info",
    "/init_weights_update_group",
    "/pause_generation",
    "/update_weights_from_distributed",
    "/continue_generation",
)
BUCKETWISE_STEPS = ("/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update")
ALL_STEPS = [*((path, False) for path in STEPS), *((path, True) for path in BUCKETWISE_STEPS)]


@pytest.mark.parametrize("engines", [8, 16, 64])
@pytest.mark.parametrize(("path", "bucketwise"), ALL_STEPS)
def test_a_hang_costs_its_engine_and_two_deadlines_at_most(engines: int, path: str, bucketwise: bool) -> None:
    # covers: C8, C10
    async def scenario(world: World, publisher: WeightPublisher) -> None:
        world.hanging["engine-3"] = path
        before = asyncio.get_running_loop().time()
        publication = await publish(publisher, 0)
        assert publication.fenced == ("engine-3",)
        assert len(publication.engines) == engines - 1
        assert asyncio.get_running_loop().time() - before <= 2 * STEP

    play(engines, scenario, bucketwise=bucketwise)


@pytest.mark.parametrize("engines", [8, 16, 64])
def test_an_engine_that_holds_up_all_others_costs_half_of_them_at_most(engines: int) -> None:
    """Members that wait for it don't give up before their own calls do: nobody can tell whose fault it is."""

    # covers: C8, C10
    async def scenario(world: World, publisher: WeightPublisher) -> None:
        world.hanging["engine-3"] = "/update_weights_from_distributed"
        before = asyncio.get_running_loop().time()
        publication = await publish(publisher, 0)
        assert "engine-3" in publication.fenced
        assert len(publication.engines) >= engines / 2
        assert asyncio.get_running_loop().time() - before <= 2 * STEP + 2 * STEP / 3  # and two probes

    play(engines, scenario, patience=None)


@pytest.mark.parametrize(("path", "bucketwise"), ALL_STEPS)
def test_a_repair_that_hangs_delays_no_publication(path: str, bucketwise: bool) -> None:
    # covers: C8, C10
    async def scenario(world: World, publisher: WeightPublisher) -> None:
        await publish(publisher, 0)
        world.servers["engine-2"].die()
        world.hanging["engine-2"] = path
        await world.supervisor.wait_for_joining()
        repair = asyncio.ensure_future(publisher.repair())
        for version in (1, 2, 3):
            await asyncio.sleep(1.0)
            before = asyncio.get_running_loop().time()
            publication = await publish(publisher, version)
            assert (publication.engines, publication.fenced) == (("engine-0", "engine-1"), ())
            assert asyncio.get_running_loop().time() - before < 0.1
            assert not repair.done()
        assert await repair == ()
        assert world.registry.engines["engine-2"].incarnation == 2, "it was fenced"
        world.hanging.clear()
        await world.supervisor.wait_for_joining()
        assert await publisher.repair() == ("engine-2",)
        assert world.registry.engines["engine-2"].version == 3

    play(3, scenario, bucketwise=bucketwise)


class SlowToKeep(BroadcastingTrainer):
    """Its ranks learn late which version a repair brings."""

    async def pin(self, version: int) -> None:
        await asyncio.sleep(5.0)
        await super().pin(version)


def test_publications_do_not_remove_the_version_of_a_repair_that_begins() -> None:
    # covers: C8
    async def scenario(world: World, publisher: WeightPublisher) -> None:
        await publish(publisher, 0)
        world.servers["engine-2"].die()
        await world.supervisor.wait_for_joining()
        repair = asyncio.ensure_future(publisher.repair())
        for version in (1, 2):
            await asyncio.sleep(1.0)
            await publish(publisher, version)
        assert await repair == ("engine-2",)
        assert world.registry.engines["engine-2"].version == 2

    play(3, scenario, trainer=SlowToKeep(patience=UNVERIFIED.group_timeout))


def test_a_repaired_engine_that_hangs_as_it_is_admitted_delays_a_publication_by_seconds() -> None:
    # covers: C8, C10
    async def scenario(world: World, publisher: WeightPublisher) -> None:
        await publish(publisher, 0)
        world.servers["engine-2"].die()
        world.hanging["engine-2"] = "/model_info"
        await world.supervisor.wait_for_joining()
        repair = asyncio.ensure_future(publisher.repair())
        await asyncio.sleep(1.0)
        before = asyncio.get_running_loop().time()
        assert (await publish(publisher, 1)).engines == ("engine-0", "engine-1")
        assert asyncio.get_running_loop().time() - before <= ADMISSION_SECONDS
        assert await repair == ()
        assert world.registry.engines["engine-2"].incarnation == 2, "it was fenced"

    play(3, scenario)


def test_a_publication_takes_repaired_engines_if_there_are_no_others() -> None:
    # covers: C8, C10
    async def scenario(world: World, publisher: WeightPublisher) -> None:
        await publish(publisher, 0)
        world.servers["engine-1"].die()
        world.seconds_per_call["engine-1"] = 0.5
        await world.supervisor.wait_for_joining()
        repair = asyncio.ensure_future(publisher.repair())
        await asyncio.sleep(1.0)
        world.start_seconds = 10_000.0
        world.servers["engine-0"].die()
        assert (await publish(publisher, 1)).engines == ("engine-1",)
        assert await repair == ()
        assert world.registry.engines["engine-1"].version == 1

    play(2, scenario)


@pytest.mark.parametrize("seconds", [0.1, 0.6, 1.0])
def test_a_repair_that_is_overtaken_is_done_again_and_not_overtaken_for_ever(seconds: float) -> None:
    # covers: C8
    async def scenario(world: World, publisher: WeightPublisher) -> None:
        repaired = []

        async def repair() -> None:
            while True:
                await world.supervisor.wait_for_joining()
                repaired.append(await publisher.repair())

        await publish(publisher, 0)
        world.servers["engine-2"].die()
        world.seconds_per_call["engine-2"] = seconds
        await world.supervisor.wait_for_joining()
        repairs = asyncio.ensure_future(repair())
        published = []
        for version in range(1, 21):
            await asyncio.sleep(3.0)
            published.append(await publish(publisher, version))
        assert "engine-2" in published[-1].engines
        assert "engine-2" not in published[0].engines or seconds < 0.2, "it was overtaken"
        assert {record.version for record in world.registry.engines.values()} == {20}
        assert repaired == [("engine-2",)]
        assert not repairs.done(), "it failed"
        repairs.cancel()
        await asyncio.gather(repairs, return_exceptions=True)

    play(3, scenario)


# --------------------------------------------------------------------------------------------------- the walk
def awaiting(task: asyncio.Task[Any]) -> list[str]:
    """The coroutine functions of engines and weights in which a task that is suspended waits, the outermost first."""
    found, coroutine = [], task.get_coro()
    while isinstance(coroutine, CoroutineType):
        found += [coroutine.cr_code.co_qualname] if is_of_the_walk(coroutine.cr_code) else []
        coroutine = coroutine.cr_await
    return found


def is_of_the_walk(code: CodeType) -> bool:
    return any(f"miles_async/{room}/" in code.co_filename for room in ("engines", "weights"))


@pytest.mark.parametrize("bucketwise", [False, True])
def test_from_the_controller_to_an_engine_a_version_takes_eight_calls(bucketwise: bool) -> None:
    walks: list[list[str]] = []

    async def scenario(world: World, publisher: WeightPublisher) -> None:
        await publisher.copy(0)
        await publisher.stage(0)
        delivery = asyncio.ensure_future(publisher.deliver(0))
        server = world.servers["engine-0"]
        answer = server.answer

        async def looking(path: str, body: bytes, headers: Mapping[str, str]) -> Any:
            if path == "/update_weights_from_distributed":
                frame, here = sys._getframe(1), []
                while frame is not None:
                    here += [frame.f_code.co_qualname] if is_of_the_walk(frame.f_code) else []
                    frame = frame.f_back  # type: ignore[assignment]
                walks.append([*awaiting(delivery), *reversed(here)])
            return await answer(path, body, headers)

        server.answer = looking  # type: ignore[method-assign]
        await delivery

    play(1, scenario, bucketwise=bucketwise)
    assert walks
    for walk in walks:
        receive = "receive_bucket" if bucketwise else "receive_stream"
        assert walk == [  # of Controller._deliver
            "WeightPublisher.deliver",
            "FleetUpdater.publish",
            "EngineUpdate.run",
            "DistributedTransport.deliver",
            "Fleet.call",
            f"SGLangServer.{receive}",
            "SGLangServer._call",
        ]
