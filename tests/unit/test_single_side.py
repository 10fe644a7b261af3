"""The loops of one side: rollouts that nobody trains, training on batches that nobody generates."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import pytest

from miles_async.arguments import OptimizerArguments
from miles_async.bad_steps import BadSteps
from miles_async.errors import DataError, EngineStartError, TrainerError
from miles_async.single_side import evaluation_alone, rollouts_alone, training_alone
from miles_async.types import PreparedBatch, TokenScores
from tests.fakes.fake_sides import FakeFleet, FakeRollout, FakeTrainer

STEPS = 3
STOPS = BadSteps(OptimizerArguments())


class Recorded:
    """A Recorder of steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, Mapping[str, float]]] = []

    def step(self, step: int, metrics: Mapping[str, float], ages: Mapping[int, int]) -> None:
        assert sum(ages.values()) == 8
        self.steps.append((step, metrics))


class Joining(FakeRollout):
    """Engines wait for weights when the test says so."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(events)
        self.joining = asyncio.Semaphore(1)

    async def wait_for_joining(self) -> None:
        await self.joining.acquire()

    async def next_batch(self, target_version: int) -> PreparedBatch:
        await asyncio.sleep(0.01)
        return await super().next_batch(target_version)


async def test_rollouts_are_cut_and_make_room_and_no_version_changes() -> None:
    # covers: P7
    events: list[str] = []
    recorded, rollout = Recorded(), Joining(events)
    await rollouts_alone(rollout, FakeFleet(events, joining=["a", "b"]), recorded, STEPS)
    assert [event for event in events if not event.startswith("admit")] == [
        "commit 0", *["cut for 0", "trained", "commit 0"] * STEPS
    ]  # fmt: skip
    assert [step for step, _ in recorded.steps] == [1, 2, 3]
    assert all(metrics["time/wait_seconds"] >= 0.01 for _, metrics in recorded.steps)
    assert rollout.closed.is_set()


async def test_engines_are_admitted_with_what_they_loaded_and_again_when_they_are_back() -> None:
    events: list[str] = []
    rollout, fleet = Joining(events), FakeFleet(events, joining=["a"])
    running = asyncio.ensure_future(rollouts_alone(rollout, fleet, Recorded(), 20))
    while fleet.serving != ["a"]:  # noqa: ASYNC110  (the fleet tells nobody)
        await asyncio.sleep(0.001)
    fleet.serving, fleet.joining = [], ["a"]  # it has been restarted
    rollout.joining.release()
    while fleet.serving != ["a"]:  # noqa: ASYNC110  (the fleet tells nobody)
        await asyncio.sleep(0.001)
    await running


async def test_an_engine_with_other_weights_is_fenced() -> None:
    events: list[str] = []
    fleet = FakeFleet(events, joining=["a", "b"])
    fleet.faults["admit 0"] = {"a"}
    await rollouts_alone(Joining(events), fleet, Recorded(), STEPS)
    assert fleet.fenced == ["a"]
    assert fleet.serving == ["b"]


async def test_an_error_of_the_rollout_side_ends_it() -> None:
    rollout = FakeRollout([])
    rollout.error = EngineStartError("no luck")
    with pytest.raises(BaseExceptionGroup) as caught:
        await rollouts_alone(rollout, FakeFleet([]), Recorded(), STEPS)
    assert caught.group_contains(EngineStartError, match="no luck")


class Evaluating(Joining):
    """An evaluation of some samples."""

    async def evaluate(self, step: int, data_sets: Collection[str] | None = None) -> Mapping[str, float]:
        for _ in range(60):
            await asyncio.sleep(0.002)
            self.events.append("evaluate")
        return {"eval/reward": 0.5}


class Results(Recorded):
    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((step, metrics))


async def test_an_evaluation_alone_admits_engines_shows_how_far_it_is_and_dispatches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("miles_async.single_side.SHOW_SECONDS", 0.02)
    events: list[str] = []
    shown: list[int] = []
    results, rollout, fleet = Results(), Evaluating(events), FakeFleet(events, joining=["a", "b"])
    await evaluation_alone(rollout, fleet, results, shown.append)
    assert results.evaluations == [(0, {"eval/reward": 0.5})]
    assert shown == sorted(shown)
    assert 0 < shown[0] < shown[-1] <= 60
    assert {*events} == {"admit 0", "evaluate"}  # no commit, which would start the dispatcher, and no cut
    assert fleet.serving == ["a", "b"]
    assert rollout.closed.is_set()


async def test_an_error_of_the_rollout_side_ends_an_evaluation() -> None:
    rollout = FakeRollout([])
    rollout.error = EngineStartError("no luck")
    with pytest.raises(BaseExceptionGroup) as caught:
        await evaluation_alone(rollout, FakeFleet([]), Results(), lambda ended: None)
    assert caught.group_contains(EngineStartError, match="no luck")


async def batch(step: int) -> PreparedBatch:
    return PreparedBatch(
        batch_id=step,
        target_version=step,
        oldest_version=0,
        prompt_ids=("prompt-0",),
        shards=(),
        metrics={"reward/mean": 0.5},
        ages={0: 8},
    )


@pytest.mark.parametrize("first", [0, 2])
async def test_training_takes_the_batch_of_each_step(first: int) -> None:
    events: list[str] = []
    recorded = Recorded()
    await training_alone(FakeTrainer(events), batch, recorded, STOPS, first=first, steps=STEPS)
    assert events == ["train"] * (STEPS - first)
    assert [step for step, _ in recorded.steps] == list(range(first + 1, STEPS + 1))
    assert all({"reward/mean", "train/loss", "time/train_seconds"} <= metrics.keys() for _, metrics in recorded.steps)


async def test_samples_get_the_scores_of_each_step() -> None:
    trainer, taken = FakeTrainer([]), list[tuple[int, object]]()
    trainer.token_scores = [TokenScores(branch=0, logprobs=None, entropies=None)]

    def trained(step: int, scores: object) -> None:
        taken.append((step, scores))

    await training_alone(trainer, batch, Recorded(), STOPS, first=0, steps=2, trained=trained)
    assert taken == [(1, trainer.token_scores), (2, trainer.token_scores)]


async def test_checkpoints_are_saved_between_steps() -> None:
    # covers: C9
    events: list[str] = []

    async def save(step: int) -> None:
        events.append(f"save {step}")

    await training_alone(FakeTrainer(events), batch, Recorded(), STOPS, first=1, steps=STEPS, save=save)
    assert events == ["train", "save 2", "train", "save 3"]


async def test_a_batch_that_cannot_be_read_ends_it() -> None:
    async def none(step: int) -> PreparedBatch:
        raise DataError("1.parquet: expected ...")

    with pytest.raises(DataError, match=r"1\.parquet"):
        await training_alone(FakeTrainer([]), none, Recorded(), STOPS, first=0, steps=STEPS)


async def test_a_trainer_that_fails_ends_it() -> None:
    class Failing(FakeTrainer):
        async def train(self, shards: object) -> Mapping[str, float]:
            raise TrainerError("rank 1")

    with pytest.raises(TrainerError, match="rank 1"):
        await training_alone(Failing([]), batch, Recorded(), STOPS, first=0, steps=STEPS)


async def test_a_bad_step_ends_it() -> None:
    class Bad(FakeTrainer):
        async def train(self, shards: object) -> Mapping[str, float]:
            return {"bad_steps/grad_norm": 1.0, "bad_grad_norm": float("inf")}

    with pytest.raises(TrainerError, match=r"grad_norm inf.* Prompts of the batch: prompt-0"):
        await training_alone(Bad([]), batch, Recorded(), STOPS, first=0, steps=STEPS)
