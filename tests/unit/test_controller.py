"""The loop, seen as the order of events on both sides."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from miles_async.arguments import (
    CheckpointArguments,
    EvaluationArguments,
    OptimizerArguments,
    RolloutArguments,
    StalenessArguments,
    WeightsArguments,
)
from miles_async.arguments.optimizer import BadStepAction
from miles_async.controller import Controller
from miles_async.errors import ContractViolation, EngineError, PublicationError, TrainerError, first_error
from miles_async.seams import Position
from miles_async.types import (
    Changes,
    FleetMembers,
    PreparedBatch,
    Publication,
    SettingValue,
    StagedWeights,
    TokenScores,
)
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.update import FleetUpdater
from tests.fakes.fake_sides import FakeFleet, FakeRollout, FakeTrainer, Results
from tests.waiting import until


class NoCheckpoints:
    def __init__(self, events: list[str], position: Position | None = None) -> None:
        self.events = events
        self.position = position

    async def save(self, position: Position) -> None:
        self.events.append(f"save {position.step}/{position.version}")

    async def finish(self) -> Mapping[str, float]:
        self.events.append("finish")
        return {"checkpoint/seconds": 1.0}

    async def load(self) -> Position | None:
        return self.position


class Records:
    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float], Mapping[int, int]]] = []
        self.publications: list[int] = []
        self.evaluations: list[int] = []
        self.checkpoints: list[tuple[int, dict[str, float]]] = []

    def step(self, step: int, metrics: Mapping[str, float], ages: Mapping[int, int]) -> None:
        self.steps.append((step, dict(metrics), ages))

    def publication(self, record: Publication) -> None:
        self.publications.append(record.version)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append(step)

    def checkpoint(self, step: int, metrics: Mapping[str, float]) -> None:
        self.checkpoints.append((step, dict(metrics)))


class BadTrainer(FakeTrainer):
    """Does not make the steps of these batches, counted from 0."""

    def __init__(self, events: list[str], bad: AbstractSet[int]) -> None:
        super().__init__(events, buckets=1)
        self.bad = bad

    async def train(self, shards: object) -> Mapping[str, float]:
        made = await super().train(shards)
        step = self.events.count("train") - 1
        return {**made, "bad_steps/grad_norm": 1.0, "bad_grad_norm": 7.0} if step in self.bad else made


class Asked:
    """LiveSettings: what is asked for before the boundary of each step."""

    def __init__(self, asked: Mapping[int, Mapping[str, SettingValue]]) -> None:
        self.asked = asked
        self.begun: list[int] = []
        self.last: list[int] = []

    def begin(self, step: int) -> None:
        self.begun.append(step)

    def take(self, step: int, *, last: bool) -> Changes | None:
        self.last += [step] if last else []
        return Changes(after=step, before={}, values=self.asked[step]) if step in self.asked else None


class Bench(msgspec.Struct):
    events: list[str]
    rollout: FakeRollout
    trainer: FakeTrainer
    fleet: FakeFleet
    records: Records
    controller: Controller


def bench(
    *,
    steps: int = 3,
    interval: int = 1,
    bound: int | None = 2,
    action: str = "recycle",
    age: int = 0,
    evaluate: bool = False,
    eval_interval: int | None = None,
    eval_config: Path | None = None,
    apart: FakeFleet | None = None,
    save_interval: int | None = None,
    resume: Position | None = None,
    bad: AbstractSet[int] = frozenset(),
    bad_steps: BadStepAction = "stop",
    asked: Mapping[int, Mapping[str, SettingValue]] | None = None,
    tmp: Path | None = None,
) -> Bench:
    events: list[str] = []
    rollout, trainer, records = FakeRollout(events, age=age), BadTrainer(events, bad), Records()
    weights = WeightsArguments(update_weights_interval=interval)
    fleet = FakeFleet([], tensors=("t0",))

    def updater(of: FakeFleet) -> FleetUpdater:
        transport = make_transport(weights, trainer, of, "cpu")
        return FleetUpdater(of, transport, weights, tolerance=1e-3, engines_timeout=0.0)

    publisher = WeightPublisher(
        trainer, updater(fleet), weights, repairs=updater(fleet), evaluation=updater(apart) if apart else None
    )
    controller = Controller(
        rollout=rollout,  # type: ignore[arg-type]
        trainer=trainer,
        publisher=publisher,
        checkpoints=NoCheckpoints(events, resume),
        recorder=records,
        live=Asked(asked or {}),
        rollout_arguments=RolloutArguments(num_rollout=steps),
        staleness=StalenessArguments(max_weight_staleness=bound, stale_group_action=action),
        optimizer=OptimizerArguments(bad_step_action=bad_steps, max_bad_steps=2),
        weights=weights,
        evaluation=EvaluationArguments(
            eval_prompt_data=("x.jsonl",) if evaluate else None, eval_interval=eval_interval, eval_config=eval_config
        ),
        checkpoint=CheckpointArguments(save="y" if save_interval else None, save_interval=save_interval),  # type: ignore[arg-type]
    )
    return Bench(events, rollout, trainer, fleet, records, controller)


async def ran(**options: Any) -> Bench:
    """A bench whose controller has run to its end."""
    b = bench(**options)
    await b.controller.run()
    return b


async def error_of(bench: Bench) -> BaseException:
    """The first error, which ends the run."""
    with pytest.raises(BaseExceptionGroup) as caught:
        await bench.controller.run()
    return first_error(caught.value)


def only(events: list[str], *prefixes: str) -> list[str]:
    return [event for event in events if event.startswith(prefixes)]


async def test_next_batch_is_cut_for_the_version_that_will_be_current() -> None:
    # covers: C1
    b = await ran(steps=3)
    assert only(b.events, "cut") == ["cut for 0", "cut for 1", "cut for 2"]
    assert b.events.index("cut for 1") < b.events.index("commit 1")  # prepared while step 0 trains


async def test_cuts_under_way_are_named_by_their_step() -> None:
    # covers: C10
    b = bench(steps=3)
    names, plain = [], b.rollout.next_batch

    def noted(target_version: int) -> Coroutine[None, None, PreparedBatch]:
        async def cut() -> PreparedBatch:
            task = asyncio.current_task()
            names.append(task.get_name())
            return await plain(target_version)

        return cut()

    b.rollout.next_batch = noted
    await b.controller.run()
    assert names == ["cut for step 1", "cut for step 2", "cut for step 3"]


@pytest.mark.parametrize("bound", [None, 3])
async def test_the_bound_is_off_by_default_and_announced_at_the_start(bound: int | None) -> None:
    # covers: M4
    assert StalenessArguments().bound is None
    b = bench(steps=10, bound=bound, age=3)
    with capture_logs() as logs:
        await b.controller.run()
    (announced,) = [entry for entry in logs if entry["event"] == "training begins"]
    assert announced["max_weight_staleness"] == ("none" if bound is None else bound)
    assert only(b.events, "train") != []


async def test_each_step_is_published_but_the_last_which_nobody_would_use() -> None:
    # covers: P6
    b = await ran(steps=3)
    assert only(b.events, "commit") == ["commit 0", "commit 1", "commit 2", "commit 2"]
    assert only(b.events, "stage") == ["stage 0", "stage 1", "stage 2"]


@pytest.mark.parametrize("part", ["stage", "receive"])
async def test_training_goes_on_while_weights_are_staged_and_sent_but_not_two_versions_ahead(part: str) -> None:
    # covers: C10
    b = bench(steps=5)
    stage, receive, gate = b.trainer.stage_weights, b.fleet.receive_stream, asyncio.Event()

    async def slow_files(version: int) -> StagedWeights:
        if version == 1:
            await gate.wait()
        return await stage(version)

    async def slow_engines(engines: object, names: object, version: int) -> Results:
        if version == 1:
            await gate.wait()
        return await receive(engines, names, version)

    if part == "stage":
        b.trainer.stage_weights = slow_files
    else:
        b.fleet.receive_stream = slow_engines
    async with asyncio.TaskGroup() as scope:
        scope.create_task(b.controller.run())
        for _ in range(300):
            await asyncio.sleep(0)
        assert only(b.events, "copy", "trained", "commit") == ["copy 0", "commit 0", "trained", "copy 1", "trained"]
        gate.set()
    assert only(b.events, "copy", "commit")[3:] == [
        "commit 1", "copy 2", "commit 2", "copy 3", "commit 3", "copy 4", "commit 4", "commit 4",
    ]  # fmt: skip
    assert [step for step, _, _ in b.records.steps] == [1, 2, 3, 4, 5]
    assert b.records.steps[1][1]["weight_version/trainer"] == 1


async def test_weights_that_cannot_be_staged_stop_the_run_and_reach_no_engine() -> None:
    # covers: C8, C10
    b = bench(steps=5)
    stage = b.trainer.stage_weights

    async def full(version: int) -> StagedWeights:
        if version == 2:
            raise TrainerError("No space left on device (--weight-staging-dir)")
        return await stage(version)

    b.trainer.stage_weights = full
    assert "--weight-staging-dir" in str(await error_of(b))
    assert only(b.events, "commit") == ["commit 0", "commit 1"]
    assert not only(b.events, "announce and send 2")
    assert [step for step, *_ in b.records.steps] == [1, 2], "the second step was trained"


async def test_a_delivery_that_fails_stops_the_run_although_the_trainer_was_ahead() -> None:
    # covers: C10
    b = bench(steps=5)

    async def nobody() -> FleetMembers:
        return FleetMembers(serving=(), joining=(), starting=(), ranks={})

    async def train_once(shards: object) -> Mapping[str, float]:
        b.fleet.members = nobody
        return {"loss": 0.0}

    b.trainer.train = train_once
    error = await error_of(b)
    assert "for an engine to publish to" in str(error)
    assert isinstance(error, PublicationError)


async def test_interval_publishes_every_second_step_and_cuts_for_the_unchanged_version() -> None:
    b = await ran(steps=4, interval=2)
    assert only(b.events, "cut") == ["cut for 0", "cut for 0", "cut for 1", "cut for 1"]
    assert only(b.events, "stage") == ["stage 0", "stage 1"]


@pytest.mark.parametrize("interval", [1, 2])
async def test_publication_waits_for_attempts_that_it_would_make_too_old(interval: int) -> None:
    # covers: C5
    b = bench(steps=5 * interval, interval=interval, action="wait")
    b.rollout.stale = {2: [1, 3]}  # three attempts hold up version 2, one step later one
    await b.controller.run()
    # A batch is cut for the version that its step will really start from, and what was trained meanwhile keeps its
    # slots, but between publications that are due anyway.
    versions = [0] * interval + [1] * (interval + 2)
    versions += [2] * interval + [3] * interval
    assert only(b.events, "cut") == [f"cut for {version}" for version in (versions + [4] * 9)[: 5 * interval]]
    published = [event for event in b.events if event.startswith(("copy", "train", "commit"))]
    between = published[published.index("copy 1") + 1 : published.index("copy 2")]
    due = ["commit 1"] if interval == 1 else ["train", "trained", "commit 1", "commit 1"]
    assert between == due + ["train", "trained"] * 3
    assert only(b.events, "copy 2") == ["copy 2"]


async def test_last_step_is_published_for_its_evaluation() -> None:
    b = await ran(steps=2, evaluate=True)
    assert b.records.evaluations == [0, 2]
    assert only(b.events, "stage", "evaluate") == ["stage 0", "evaluate", "stage 1", "stage 2", "evaluate"]


async def test_the_rollout_side_is_closed_after_the_last_evaluation() -> None:
    b = bench(steps=2, evaluate=True)
    plain = b.rollout.close

    async def close() -> None:
        b.events.append("close")
        await plain()

    b.rollout.close = close
    await b.controller.run()
    assert only(b.events, "stage 2", "evaluate", "close") == ["evaluate", "stage 2", "evaluate", "close"]


async def test_publication_waits_for_the_evaluation_of_the_visible_version() -> None:
    # covers: R4
    b = bench(steps=1, evaluate=True)
    gate = asyncio.Event()
    plain = b.rollout.evaluate

    async def slow(step: int, data_sets: Collection[str]) -> Mapping[str, float]:
        await gate.wait()
        return await plain(step, data_sets)

    b.rollout.evaluate = slow
    async with asyncio.TaskGroup() as scope:
        scope.create_task(b.controller.run())
        for _ in range(50):
            await asyncio.sleep(0)
        assert "stage 1" in b.events, "that takes nothing from the engines"
        assert "commit 1" not in b.events
        gate.set()
    assert "commit 1" in b.events


async def test_an_evaluation_with_engines_of_its_own_holds_nothing_up() -> None:
    # covers: R4
    apart = FakeFleet([], tensors=("t0",))
    b = bench(steps=4, evaluate=True, eval_interval=2, apart=apart)
    gates = [asyncio.Event() for _ in range(3)]
    plain, evaluations = b.rollout.evaluate, iter(gates)
    pinned = []

    async def slow(step: int, data_sets: Collection[str]) -> Mapping[str, float]:
        gate = next(evaluations)
        pinned.append(apart.versions["engine-0"])
        await gate.wait()
        return await plain(step, data_sets)

    b.rollout.evaluate = slow
    async with asyncio.TaskGroup() as scope:
        scope.create_task(b.controller.run())
        await until(lambda: "commit 2" in b.events)  # training goes on during the evaluation of version 0
        for _ in range(300):
            await asyncio.sleep(0)
        assert "commit 3" not in b.events, "until the next evaluation wants the same engines"
        assert apart.versions["engine-0"] == 0
        for gate in gates:
            gate.set()
    assert pinned == [0, 2, 4]
    assert b.records.evaluations == [0, 2, 4]


async def test_engines_for_evaluation_that_fail_do_not_stop_training() -> None:
    # covers: A9
    b = await ran(steps=2, evaluate=True, apart=FakeFleet([], joining=()))
    assert len(b.records.steps) == 2
    assert b.records.evaluations == []


async def test_failing_evaluation_does_not_stop_training() -> None:
    # covers: A9
    b = bench(steps=2, evaluate=True)
    b.rollout.evaluation_error = EngineError("no engine answers")
    await b.controller.run()
    assert len(b.records.steps) == 2


async def test_a_checkpoint_is_made_whole_while_training_goes_on_and_at_the_end() -> None:
    # covers: C9
    b = await ran(steps=3, save_interval=2)
    order = only(b.events, "save", "finish", "trained")
    assert order == ["trained", "trained", "save 2/2", "finish", "trained", "save 3/2", "finish", "finish"]
    assert b.records.checkpoints == [(step, {"checkpoint/seconds": 1.0}) for step in (2, 3, 3)]


async def test_batch_older_than_the_bound_stops_the_run_before_the_optimizer_steps() -> None:
    # covers: C1
    b = bench(steps=3, bound=1, age=2)
    assert isinstance(await error_of(b), ContractViolation)
    assert b.events.count("train") == 2  # versions 0 and 1: the age was 0 and 1


async def test_batch_cut_for_another_version_stops_the_run() -> None:
    # covers: C1
    b = bench(steps=2, bound=None)
    plain = b.rollout.next_batch
    b.rollout.next_batch = lambda target_version: plain(target_version + 1)
    assert "cut for version 1, but the trainer is at 0" in str(await error_of(b))
    assert "train" not in b.events


async def test_log_probs_are_compared_only_where_the_trainer_has_published_its_weights() -> None:
    b = bench(steps=4, interval=2)

    async def train(shards: object) -> Mapping[str, float]:
        return {"loss": 0.0, "logprob_diff_max": 0.5, "logprob_diff_tokens": 8.0}

    b.trainer.train = train
    await b.controller.run()
    compared = [step for step, metrics, _ in b.records.steps if "train/logprob_diff_max" in metrics]
    assert compared == [1, 3]  # steps 2 and 4 start from weights that no engine has


async def test_rollout_failure_stops_the_trainer_and_is_the_error_that_surfaces() -> None:
    # covers: A1, C10
    b = bench(steps=1000)
    b.rollout.error = EngineError("all engines are gone")
    assert str(await error_of(b)) == "all engines are gone"


async def test_trainer_failure_stops_the_rollout_side() -> None:
    b = bench()

    async def die(shards: object) -> Mapping[str, float]:
        raise TrainerError("rank 1 died")

    b.trainer.train = die
    assert str(await error_of(b)) == "rank 1 died"


async def test_resume_gives_weights_that_were_never_published_a_new_version() -> None:
    # covers: C9
    b = await ran(steps=5, resume=Position(step=3, version=7, unpublished=1).resumed())
    assert only(b.events, "stage", "cut") == ["stage 8", "cut for 8", "cut for 9", "stage 9"]


async def test_resuming_a_run_that_is_complete_ends_at_once() -> None:
    # covers: C9
    b = await ran(steps=3, resume=Position(step=3, version=2), evaluate=True)
    assert only(b.events, "cut", "train") == []
    assert b.records.evaluations == [3]


async def test_resume_goes_on_with_step_and_version_and_publishes_before_generating() -> None:
    b = await ran(steps=5, resume=Position(step=3, version=7), save_interval=1)
    assert only(b.events, "copy", "cut", "save") == [
        "copy 7", "cut for 7", "cut for 8", "copy 8", "save 4/8", "save 5/8",
    ]  # fmt: skip
    assert [step for step, _, _ in b.records.steps] == [4, 5]


async def test_a_bad_step_ends_the_run_and_names_its_prompts() -> None:
    b = bench(steps=3, bad={1})
    assert re.search(r"version 1 was not made: grad_norm 7\..* prompt-0, prompt-1$", str(await error_of(b)))
    assert only(b.events, "trained") == ["trained"]  # the first batch alone


async def test_a_batch_whose_bad_step_is_skipped_is_spent_and_its_version_counts() -> None:
    # covers: C1, C2
    b = bench(steps=5, bad={1, 3}, bad_steps="skip")
    with capture_logs() as logs:
        await b.controller.run()
    assert only(b.events, "cut") == [f"cut for {version}" for version in range(5)]
    assert only(b.events, "trained") == ["trained"] * 5
    assert [entry["prompts"] for entry in logs if entry["event"] == "an optimizer step was not made"] == [
        "prompt-0, prompt-1"
    ] * 2


async def test_too_many_bad_steps_in_a_row_end_the_run() -> None:
    b = bench(steps=5, bad={1, 2}, bad_steps="skip")  # at most two
    assert "in 2 rollout steps in a row (--max-bad-steps)" in str(await error_of(b))


async def test_changes_are_made_between_two_cuts_and_by_the_trainer_between_two_steps() -> None:
    # covers: C1
    b = await ran(steps=3, asked={2: {"max_weight_staleness": 1, "lr": 1e-5}})
    of_rollout = "change {'max_weight_staleness': 1, 'lr': 1e-05} after 2"
    of_trainer = "change {'max_weight_staleness': 1, 'lr': 1e-05}"
    events = only(b.events, "cut", "train", "change")
    assert [event for event in events if event.startswith("cut") or event == of_rollout] == [
        "cut for 0", "cut for 1", of_rollout, "cut for 2",
    ]  # fmt: skip
    assert [event for event in events if event in ("train", of_trainer)] == ["train", "train", of_trainer, "train"]


async def test_samples_get_the_scores_of_each_step() -> None:
    b = bench(steps=2)
    b.trainer.token_scores = [TokenScores(branch=0, logprobs=None, entropies=None)]
    await b.controller.run()
    assert b.rollout.scores == [b.trainer.token_scores] * 2


@pytest.mark.parametrize(("bound", "lowered", "steps"), [(2, 1, 2), (1, 2, None)])
async def test_a_batch_is_judged_by_the_bound_that_it_was_cut_under(
    bound: int, lowered: int, steps: int | None
) -> None:
    """Batches of age 2 from step 3 on: cut for version 2 and later."""
    # covers: C1
    b = bench(steps=5, bound=bound, age=2, asked={2: {"max_weight_staleness": lowered}})
    if steps is None:
        await b.controller.run()  # raised in time
        return
    assert "above --max-weight-staleness 1" in str(await error_of(b))
    assert only(b.events, "train") == ["train", "trained"] * steps  # step 3 was cut under the lower one


async def test_an_evaluation_that_is_asked_for_follows_its_step() -> None:
    b = await ran(steps=4, evaluate=True, asked={2: {"evaluation": "now"}})
    assert b.records.evaluations == [0, 2, 4]


@pytest.mark.parametrize("asked", [{"evaluation": "now"}, {"stop": "after-step"}])
async def test_what_is_asked_for_evaluates_every_data_set(asked: Mapping[str, SettingValue], tmp_path: Path) -> None:
    """Also at a step where only one of them is due."""
    config = tmp_path / "eval.json"
    sets = [{"name": "often", "path": "a.jsonl", "interval": 1}, {"name": "rarely", "path": "b.jsonl"}]
    config.write_text(json.dumps({"eval": {"datasets": sets}}))
    b = await ran(steps=5, eval_config=config, asked={2: asked})
    assert b.rollout.evaluated_sets[:3] == [["often", "rarely"], ["often"], ["often", "rarely"]]


async def test_a_checkpoint_that_is_asked_for_follows_its_step() -> None:
    b = await ran(steps=4, asked={2: {"checkpoint": "now"}})
    assert only(b.events, "save") == ["save 2/2"]


async def test_a_stop_makes_its_step_the_last_one() -> None:
    # covers: C9
    b = await ran(steps=9, evaluate=True, save_interval=9, asked={2: {"stop": "after-step"}})
    assert only(b.events, "cut", "save") == ["cut for 0", "cut for 1", "save 2/2"]
    assert b.records.evaluations == [0, 2]
    assert [step for step, _, _ in b.records.steps] == [1, 2]


async def test_the_last_step_is_announced_and_a_resumed_run_says_where_it_is() -> None:
    b = await ran(steps=5, resume=Position(step=3, version=3))
    live = b.controller._live
    assert isinstance(live, Asked)
    assert (live.begun, live.last) == ([3], [5])
