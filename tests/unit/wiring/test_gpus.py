"""Trainer and engines that share GPUs take turns, whatever is evaluated and saved in between.

# covers: C11
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.arguments import (
    Arguments,
    CheckpointArguments,
    EvaluationArguments,
    OptimizerArguments,
    RolloutArguments,
    StalenessArguments,
    WeightsArguments,
)
from miles_async.arguments.cluster_checks import check_colocation
from miles_async.arguments.parser import assemble
from miles_async.controller import Controller
from miles_async.engines.placement import EnginePlace
from miles_async.errors import EngineError
from miles_async.seams import Position
from miles_async.types import CanaryScore, Incarnation, PreparedBatch
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.update import FleetUpdater
from miles_async.wiring.gpus import OwnGpus, SharedGpus, shared_places
from tests.fakes.fake_sides import FakeFleet, FakeRollout, FakeTrainer


class Gpu:
    """Memory that has room for one side."""

    def __init__(self) -> None:
        self.has = {"engines"}

    def take(self, side: str) -> None:
        assert not self.has, f"{side} beside {self.has}"
        self.has.add(side)

    def need(self, side: str) -> None:
        assert side in self.has, f"{side} without memory"


class Engines(FakeFleet):
    """Neither take weights nor generate while their memory is released."""

    def __init__(self, events: list[str], gpu: Gpu) -> None:
        super().__init__(events, tensors=("t0",))
        self.gpu = gpu

    async def release_memory(self, engines: Sequence[Incarnation]) -> Mapping[Incarnation, Exception | None]:
        assert {engine.engine for engine in engines} <= self.paused
        self.gpu.has.remove("engines")
        return await super().release_memory(engines)

    async def retake_memory(self, engines: Sequence[Incarnation]) -> Mapping[Incarnation, Exception | None]:
        self.gpu.take("engines")
        return await super().retake_memory(engines)

    async def begin_update(self, engines: Sequence[Incarnation]) -> Mapping[Incarnation, Exception | None]:
        self.gpu.need("engines")
        return await super().begin_update(engines)

    async def receive_stream(
        self, engines: Sequence[Incarnation], group_names: Sequence[str], version: int
    ) -> Mapping[Incarnation, Exception | None]:
        self.gpu.need("engines")
        return await super().receive_stream(engines, group_names, version)

    async def score(
        self, engines: Sequence[Incarnation], tokens: Sequence[int]
    ) -> Mapping[Incarnation, CanaryScore | Exception]:
        self.gpu.need("engines")
        return await super().score(engines, tokens)


class Trainer(FakeTrainer):
    """Does nothing while it is offloaded."""

    def __init__(self, events: list[str], gpu: Gpu) -> None:
        super().__init__(events, buckets=1)
        self.gpu = gpu

    async def start(self) -> None:
        self.gpu.take("trainer")

    async def offload(self) -> None:
        self.gpu.has.remove("trainer")
        self.events.append("offload")

    async def onload(self) -> None:
        self.gpu.take("trainer")
        self.events.append("onload")

    async def train(self, shards: Sequence[object]) -> Mapping[str, float]:
        self.gpu.need("trainer")
        return await super().train(shards)

    async def copy_weights(self, version: int) -> None:
        self.gpu.need("trainer")
        await super().copy_weights(version)


class Rollout(FakeRollout):
    """Generates with the version that it is asked for, and evaluates for a while."""

    def __init__(self, events: list[str], gpu: Gpu) -> None:
        super().__init__(events)
        self.gpu = gpu
        self.visible = -1
        self.committed = asyncio.Condition()

    async def commit_version(self, version: int) -> None:
        await super().commit_version(version)
        async with self.committed:
            self.visible = version
            self.committed.notify_all()

    async def next_batch(self, target_version: int) -> PreparedBatch:
        async with self.committed:
            await self.committed.wait_for(lambda: self.visible == target_version)
        self.gpu.need("engines")
        return await super().next_batch(target_version)

    async def evaluate(self, step: int, data_sets: Collection[str] | None = None) -> Mapping[str, float]:
        for _ in range(20):
            self.gpu.need("engines")
            await asyncio.sleep(0)
        return await super().evaluate(step, data_sets)


class Checkpoints:
    def __init__(self, events: list[str], gpu: Gpu) -> None:
        self.events, self.gpu = events, gpu

    async def save(self, position: Position) -> None:
        for _ in range(20):
            self.gpu.need("trainer")
            await asyncio.sleep(0)
        self.events.append(f"save {position.step}")

    async def finish(self) -> None: ...

    async def load(self) -> Position | None:
        self.gpu.need("trainer")
        return None


class Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.evaluations.append(1) if name == "evaluation" else None

    def __init__(self) -> None:
        self.evaluations: list[int] = []


class Run:
    """A colocated run of fakes."""

    def __init__(self, steps: int = 2, eval_interval: int | None = None, save_interval: int | None = None) -> None:
        self.events: list[str] = []
        self.gpu = Gpu()
        self.fleet, self.trainer = Engines(self.events, self.gpu), Trainer(self.events, self.gpu)
        self.gpus = SharedGpus(self.fleet, self.trainer)
        self.recorder = Silent()
        weights = WeightsArguments()

        def updater() -> FleetUpdater:
            transport = make_transport(weights, self.trainer, self.fleet, "cpu")
            return FleetUpdater(self.fleet, transport, weights, tolerance=1e-3, engines_timeout=0.0)

        self.controller = Controller(
            rollout=Rollout(self.events, self.gpu),  # type: ignore[arg-type]
            trainer=self.trainer,
            publisher=WeightPublisher(self.trainer, updater(), weights, repairs=updater()),
            checkpoints=Checkpoints(self.events, self.gpu),
            recorder=self.recorder,
            gpus=self.gpus,
            rollout_arguments=RolloutArguments(num_rollout=steps),
            staleness=StalenessArguments(on_policy=True),
            optimizer=OptimizerArguments(),
            weights=weights,
            evaluation=EvaluationArguments(
                eval_prompt_data=("x.jsonl",) if eval_interval else None, eval_interval=eval_interval
            ),
            checkpoint=CheckpointArguments(save=Path("y") if save_interval else None, save_interval=save_interval),
        )

    async def engines_start(self) -> None:
        self.gpu.need("engines")
        self.events.append("engines start")

    async def to_the_end(self) -> None:
        await self.gpus.start(self.engines_start, self.trainer.start)
        async with asyncio.timeout(10):
            await self.controller.run()


async def test_the_order_of_a_step() -> None:
    run = Run(steps=2)
    await run.to_the_end()
    border = ("engines", "release", "onload", "train", "copy", "offload", "retake", "commit")
    assert [event for event in run.events if event.startswith(border) and event != "trained"] == [
        *("engines start", "release", "copy 0", "offload", "retake", "commit 0"),
        *("release", "onload", "train", "copy 1", "offload", "retake", "commit 1"),
        *("release", "onload", "train", "commit 1"),  # the last step's weights go to nobody
    ]


@given(
    steps=st.integers(1, 4),
    eval_interval=st.sampled_from([None, 1, 2]),
    save_interval=st.sampled_from([None, 1, 2]),
)
def test_the_sides_are_never_on_the_gpus_together_and_never_without(
    steps: int, eval_interval: int | None, save_interval: int | None
) -> None:
    async def to_the_end() -> Run:
        run = Run(steps, eval_interval, save_interval)
        await run.to_the_end()
        await run.gpus.for_training(None)  # as for --save-hf
        run.gpu.need("trainer")
        return run

    run = asyncio.run(to_the_end())
    assert run.events.count("train") == steps
    expected = {0, steps, *range(0, steps + 1, eval_interval)} if eval_interval else set()
    assert len(run.recorder.evaluations) == len(expected)


async def test_an_engine_that_keeps_its_memory_ends_the_run() -> None:
    run = Run()
    run.fleet.faults["release"] = {"engine-0"}
    with pytest.raises(EngineError, match=r"--colocate: engine-0.* does not release its GPU: release refused"):
        await run.to_the_end()


async def test_an_engine_that_was_lost_has_no_memory_to_release() -> None:
    run = Run()
    run.fleet.joining = ["engine-0", "engine-1"]
    release = run.fleet.release_memory

    async def lose(engines: Sequence[Incarnation]) -> Mapping[Incarnation, Exception | None]:
        if len(engines) == 2:
            run.fleet.joining.remove("engine-1")
        return await release(engines)

    run.fleet.release_memory = lose  # type: ignore[method-assign]
    await run.to_the_end()
    assert run.fleet.serving == ["engine-0"]


async def test_an_engine_that_gets_no_memory_is_fenced() -> None:
    run = Run()
    run.fleet.joining = ["engine-0", "engine-1"]
    run.fleet.faults["retake"] = {"engine-1"}
    await run.to_the_end()
    assert "engine-1" in run.fleet.fenced


async def test_sides_with_gpus_of_their_own_start_together() -> None:
    both = asyncio.Barrier(2)

    async def start() -> None:
        await both.wait()

    async with asyncio.timeout(50):
        await OwnGpus().start(start, start)


def sharing(nodes: int, gpus: int, size: int, engines: int, spread: int = 1, transport: str = "ipc") -> Arguments:
    """``size``: GPUs per engine. ``spread``: nodes per engine."""
    trainer = {"actor_num_nodes": nodes, "actor_num_gpus_per_node": gpus}
    fleet = {"rollout_num_gpus": size * engines, "rollout_num_gpus_per_engine": size, "engine_max_restarts": 0}
    turns = {"colocate": True, "on_policy": True, "weight_transport": transport}
    return assemble({**trainer, **fleet, "rollout_num_nodes_per_engine": spread, **turns}, {})


@pytest.mark.parametrize("transport", ["ipc", "mine:SPEC"])
def test_engines_see_their_ranks_gpus_first_and_the_one_that_weights_come_from(transport: str) -> None:
    locations = [("node", gpu) for gpu in "3120"]
    assert shared_places(sharing(1, 4, size=2, engines=2, transport=transport), locations) == {
        "engine": (
            EnginePlace(node_ids=("node",), gpus=(("3", "1"),)),
            EnginePlace(node_ids=("node",), gpus=(("2", "0", "3"),)),
        )
    }


@pytest.mark.parametrize("transport", ["object_store", "disk"])
def test_engines_that_load_files_see_their_ranks_gpus_only(transport: str) -> None:
    places = shared_places(sharing(1, 2, size=1, engines=2, transport=transport), [("node", "1"), ("node", "0")])
    assert [place.gpus for place in places["engine"]] == [(("1",),), (("0",),)]


def test_an_engine_of_several_nodes_has_the_gpus_of_each() -> None:
    run = sharing(4, 2, size=4, engines=2, spread=2, transport="disk")
    locations = [(node, gpu) for node, gpus in zip("abcd", ("01", "10", "23", "01"), strict=True) for gpu in gpus]
    assert shared_places(run, locations)["engine"] == (
        EnginePlace(node_ids=("a", "b"), gpus=(("0", "1"), ("1", "0"))),
        EnginePlace(node_ids=("c", "d"), gpus=(("2", "3"), ("0", "1"))),
    )


@given(
    nodes=st.integers(1, 5),
    gpus=st.integers(1, 8),
    share=st.integers(1, 9),
    spread=st.integers(1, 3),
    engines=st.integers(1, 12),
    data=st.data(),
)
def test_every_accepted_layout_has_places_and_no_gpu_is_in_two_engines(
    nodes: int, gpus: int, share: int, spread: int, engines: int, data: st.DataObject
) -> None:
    run = sharing(nodes, gpus, share * spread, engines, spread, transport="object_store")
    order = [data.draw(st.permutations([str(gpu) for gpu in range(gpus)])) for _ in range(nodes)]
    locations = [(f"node-{node}", gpu) for node, gpus in enumerate(order) for gpu in gpus]
    places = shared_places(run, locations)["engine"]
    if list(check_colocation(run)):
        assert len(places) < engines  # no layout is refused that has room
        return
    assert len(places) == engines
    taken = [
        (node, gpu) for place in places for node, own in zip(place.node_ids, place.gpus, strict=True) for gpu in own
    ]
    assert len({*taken}) == len(taken) == engines * share * spread
    assert {*taken} <= {*locations}
    for place in places:
        assert len({*place.node_ids}) == spread
        assert {len(own) for own in place.gpus} == {share}
