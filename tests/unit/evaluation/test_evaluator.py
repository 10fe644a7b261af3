"""Evaluation: bounded, streaming, by data set.

# covers: A9, R6
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from miles_async.commands.evaluation_report import evaluated
from miles_async.errors import RewardError, StalledError
from miles_async.evaluation.evaluator import DataSet, Evaluator, Record
from miles_async.evaluation.totals import Totals, pass_at_k
from miles_async.runtime.services import Circuit, Services
from miles_async.samples import recorder as recorder_module
from miles_async.samples.reader import read_note, read_rows, samples_files
from miles_async.samples.recorder import SampleRecorder
from miles_async.simulation.virtual_time import run_in_virtual_time
from miles_async.types import Attempt, Prompt, Sample
from tests.property.builders import make_sample


class Bench:
    """Prompts "p0", "p1", ... per data set; ``rewards(prompt, sample)`` may return an error."""

    def __init__(
        self,
        rewards: Callable[[int, int], float | BaseException] = lambda prompt, sample: 1.0,
        *,
        sets: Mapping[str, int],
        n_samples: int = 1,
        concurrency: int = 8,
        seconds: float = 0.0,
        record: Record | None = None,
    ) -> None:
        self.rewards, self.seconds, self.services = rewards, seconds, Services()
        self.taken = self.in_flight = self.most_in_flight = self.finished = self.most_ahead = 0
        self.attempt_ids: set[int] = set()
        self.evaluator = Evaluator(
            {
                name: DataSet(
                    prompts=partial(self.prompts, count),
                    client=None,
                    generate=self.generate,
                    reward=self.reward,
                    n_samples=n_samples,
                )
                for name, count in sets.items()
            },
            concurrency=concurrency,
            service=Circuit("generation"),
            services=self.services,
            stall_timeout=60.0,
            record=record,
        )

    def change(self, **parts: object) -> None:
        """Give every data set other parts."""
        data_sets = self.evaluator._data_sets
        self.evaluator._data_sets = {name: replace(each, **parts) for name, each in data_sets.items()}

    def prompts(self, count: int) -> Iterator[Prompt]:
        for number in range(count):
            self.taken += 1
            self.most_ahead = max(self.most_ahead, self.taken - self.finished)
            yield Prompt(prompt_id=str(number), token_ids=(1, 2), text="")

    async def generate(self, client: object, attempt: Attempt, sample_index: int) -> Sample:
        self.attempt_ids.add(attempt.attempt_id)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1
        tokens = int(attempt.prompt.prompt_id) + 1
        return make_sample(
            [3] * tokens, text=str(sample_index), finish_reason="length" if tokens == 1 else "stop", reward=None
        )

    async def reward(self, prompt: Prompt, sample: Sample) -> float:
        self.finished += 1
        reward = self.rewards(int(prompt.prompt_id), int(sample.text))
        if isinstance(reward, BaseException):
            raise reward
        return reward


async def test_metrics_of_a_data_set():
    # Prompt 0 is answered right by 1 of 4 samples, prompt 1 by none.
    bench = Bench(lambda prompt, sample: float(prompt == 0 and sample == 2), sets={"aime": 2}, n_samples=4)
    assert await bench.evaluator.run(0) == pytest.approx(
        {
            "eval/reward": 1 / 8,
            "eval/aime/reward/mean": 1 / 8,
            "eval/aime/pass@1": 1 / 8,
            "eval/aime/pass@2": (1 / 2 + 0) / 2,
            "eval/aime/pass@4": 1 / 2,
            "eval/aime/response_length/mean": 1.5,
            "eval/aime/response_length/max": 2,
            "eval/aime/truncated_ratio": 0.5,
            "eval/aime/weight_version/min": 3,
            "eval/aime/weight_version/max": 3,
            "eval/aime/samples": 8,
            "eval/aime/failed_samples": 0,
        }
    )
    assert bench.evaluator.ended == 8
    assert len(bench.attempt_ids) == 2
    assert max(bench.attempt_ids) < 0  # never those of training attempts


async def test_data_sets_count_alike_in_the_mean_reward():
    bench = Bench(lambda prompt, sample: float(prompt == 0), sets={"short": 1, "long": 10})
    metrics = await bench.evaluator.run(0)
    assert metrics["eval/short/reward/mean"] == 1.0
    assert metrics["eval/long/reward/mean"] == pytest.approx(0.1)
    assert metrics["eval/reward"] == pytest.approx(0.55)
    assert len(bench.attempt_ids) == 11


async def test_the_mean_reward_is_none_of_fewer_data_sets():
    bench = Bench(lambda prompt, sample: RewardError("down") if prompt == 1 else 1.0, sets={"short": 1, "long": 2})
    assert (await bench.evaluator.run(0))["eval/reward"] == 1.0
    bench = Bench(lambda prompt, sample: RewardError("cannot tell"), sets={"short": 1})
    bench.evaluator._data_sets |= Bench(sets={"long": 2}).evaluator._data_sets
    assert "eval/reward" not in await bench.evaluator.run(0)


async def test_samples_that_fail_are_counted_and_left_out():
    def rewards(prompt: int, sample: int) -> float | BaseException:
        return RewardError("cannot tell") if sample == 0 or prompt == 2 else float(prompt == 0)

    metrics = await Bench(rewards, sets={"aime": 3}, n_samples=2).evaluator.run(0)
    assert metrics["eval/aime/failed_samples"] == 4
    assert metrics["eval/aime/samples"] == 2
    assert metrics["eval/aime/reward/mean"] == metrics["eval/aime/pass@1"] == 0.5
    assert "eval/aime/pass@2" not in metrics  # nothing is known of two samples


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt()])
async def test_whatever_user_code_raises_costs_one_sample(error: BaseException):
    # covers: C6
    metrics = await Bench(lambda prompt, sample: error if prompt == 0 else 1.0, sets={"aime": 3}).evaluator.run(0)
    assert (metrics["eval/aime/failed_samples"], metrics["eval/aime/samples"]) == (1, 2)


async def test_an_outage_of_a_service_that_generation_needs_is_waited_for():
    # covers: C6
    bench = Bench(sets={"aime": 3})
    generate, failures = bench.generate, iter([ConnectionRefusedError(), TimeoutError()])

    async def down_at_first(client: object, attempt: Attempt, sample_index: int) -> Sample:
        if error := next(failures, None):
            raise error
        return await generate(client, attempt, sample_index)

    bench.change(generate=down_at_first)
    metrics = await bench.evaluator.run(0)
    assert (metrics["eval/aime/failed_samples"], metrics["eval/aime/samples"]) == (0, 3)


@pytest.mark.parametrize("outage", [0.0, 130.0])
def test_an_evaluation_that_gets_stuck_is_given_up_and_an_outage_is_waited_for(outage: float):
    # covers: C10
    bench = Bench(sets={"aime": 3}, concurrency=1, seconds=50.0)
    generate = bench.generate

    async def never(client: object, attempt: Attempt, sample_index: int) -> Sample:
        await asyncio.sleep(1e6 if bench.finished == 2 else 0.0)
        return await generate(client, attempt, sample_index)

    async def story() -> float:
        bench.change(generate=never)
        bench.services.paused_until = lambda: outage
        with pytest.raises(StalledError, match=r"none of its samples ended for 60 s \(--stall-timeout\)"):
            await bench.evaluator.run(0)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(story()) == pytest.approx(100.0 + max(0.0, outage - 100.0) + 60.0)


async def test_when_all_fail_there_is_no_mean_reward_rather_than_zero():
    metrics = await Bench(lambda prompt, sample: ValueError("broken"), sets={"aime": 3}).evaluator.run(0)
    assert metrics == {"eval/aime/samples": 0, "eval/aime/failed_samples": 3}


@pytest.mark.parametrize(("n_samples", "concurrency"), [(1, 4), (3, 4), (8, 4)])
async def test_no_more_samples_are_in_flight_than_asked_for(n_samples: int, concurrency: int):
    bench = Bench(sets={"a": 20, "b": 20}, n_samples=n_samples, concurrency=concurrency, seconds=0.02)
    await bench.evaluator.run(0)
    assert bench.most_in_flight == concurrency
    assert bench.finished == 40 * n_samples


async def test_prompts_are_read_as_they_are_needed():
    bench = Bench(sets={"large": 200}, concurrency=4)
    await bench.evaluator.run(0)
    assert bench.most_ahead <= 4 + 1


async def test_prompts_that_cannot_be_read_end_the_evaluation_with_their_error():
    def broken() -> Iterator[Prompt]:
        yield Prompt(prompt_id="0", token_ids=(1, 2), text="")
        raise OSError("the disk is gone")

    bench = Bench(sets={"a": 1})
    bench.change(prompts=broken)
    with pytest.raises(ExceptionGroup) as caught:
        await bench.evaluator.run(0)
    assert caught.group_contains(OSError, match="the disk is gone")


async def test_a_group_reward_sees_the_samples_of_a_prompt_that_did_not_fail(tmp_path: Path):
    recorder, seen = recorder_in(tmp_path), list[tuple[str, int]]()

    async def shares(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        seen.append((prompt.prompt_id, len(samples)))
        return [sample.reward / len(samples) for sample in samples]

    rewards = lambda prompt, sample: RewardError("no") if (prompt, sample) == (1, 0) else 1.0  # noqa: E731
    bench = Bench(rewards, sets={"aime": 2}, n_samples=4, record=recorder.evaluation)
    bench.change(group_reward=shares)
    metrics = await bench.evaluator.run(0)
    assert sorted(seen) == [("0", 4), ("1", 3)]
    assert metrics["eval/aime/reward/mean"] == pytest.approx((4 / 4 + 3 / 3) / 7)
    assert (metrics["eval/aime/samples"], metrics["eval/aime/failed_samples"]) == (7, 1)
    recorder.finish()
    (file,) = samples_files(tmp_path)
    found = [(row.prompt_id, row.sample, row.reward) for row in read_rows(file.path)]
    assert sorted(found) == [("0", n, 1 / 4) for n in range(4)] + [("1", n, pytest.approx(1 / 3)) for n in (1, 2, 3)]


async def test_a_group_reward_that_fails_costs_the_samples_of_its_prompt():
    # covers: C6
    async def fails(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        if prompt.prompt_id == "1":
            raise SystemExit(3)
        return [1.0] * len(samples)

    bench = Bench(sets={"aime": 3}, n_samples=2)
    bench.change(group_reward=fails, reward=None)
    metrics = await bench.evaluator.run(0)
    assert (metrics["eval/aime/samples"], metrics["eval/aime/failed_samples"]) == (4, 2)
    assert bench.evaluator.ended == 6


# ------------------------------------------------------------------------------------------------------------ samples
@pytest.fixture(autouse=True)
def _writing_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FINISH_SECONDS", 150.0)


def recorder_in(run_dir: Path) -> SampleRecorder:
    return SampleRecorder(run_dir / "samples", groups=1, limit_bytes=1 << 30, decode=lambda tokens: "x" * len(tokens))


async def test_samples_are_recorded_with_data_set_step_and_reward_and_failed_ones_left_out(tmp_path: Path):
    recorder = recorder_in(tmp_path)
    rewards = lambda prompt, sample: RewardError("no") if sample else float(prompt)  # noqa: E731
    await Bench(rewards, sets={"aime": 2, "gsm": 1}, n_samples=2, record=recorder.evaluation).evaluator.run(20)
    recorder.finish()
    (file,) = samples_files(tmp_path)
    rows = read_rows(file.path)
    assert (file.kind, file.step) == ("eval", 20)
    assert [(row.data_set, row.prompt_id, row.sample, row.samples, row.reward) for row in rows] == [
        ("aime", "0", 0, 2, 0.0),
        ("aime", "1", 0, 2, 1.0),
        ("gsm", "0", 0, 2, 0.0),
    ]
    assert read_note(file.path).why_fewer is None


@pytest.mark.parametrize("all_fail", [False, True])
async def test_the_file_of_an_evaluation_says_how_many_samples_were_asked_for(tmp_path: Path, all_fail: bool):
    recorder = recorder_in(tmp_path)
    rewards = lambda prompt, sample: RewardError("no") if sample or all_fail else float(prompt)  # noqa: E731
    await Bench(rewards, sets={"aime": 2, "gsm": 1}, n_samples=2, record=recorder.evaluation).evaluator.run(20)
    recorder.finish()
    found = evaluated(tmp_path)
    assert found.note.asked == {"aime": 4, "gsm": 2}
    counts = [(each.samples, each.asked) for each in found.data_sets.values()]
    assert counts == ([(0, 4), (0, 2)] if all_fail else [(2, 4), (1, 2)])


async def test_samples_of_an_evaluation_that_is_cancelled_are_kept(tmp_path: Path):
    recorder = recorder_in(tmp_path)
    bench = Bench(sets={"aime": 9}, concurrency=1, seconds=0.01, record=recorder.evaluation)
    task = asyncio.create_task(bench.evaluator.run(20))
    while not bench.finished:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    recorder.finish()
    (file,) = samples_files(tmp_path)
    assert read_note(file.path).why_fewer == "the evaluation was interrupted"
    assert 0 < len(read_rows(file.path)) < 9


# ------------------------------------------------------------------------------------------------------------- pass@k
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (4, 2), (5, 4), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(n: int, k: int):
    for right in range(n + 1):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert math.isclose(pass_at_k(n, right, k), sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "ks"), [(1, {1}), (2, {1, 2}), (6, {1, 2, 4, 6}), (8, {1, 2, 4, 8})])
def test_k_doubles_up_to_the_number_of_samples(n: int, ks: set[int]):
    totals = Totals(n)
    totals.end_prompt([1.0] * n)
    assert {name for name in totals.metrics() if name.startswith("pass")} == {f"pass@{k}" for k in ks}


def test_versions_that_differ_are_seen():
    totals = Totals(2)
    for versions in ([3, 4], [4, 4]):
        totals.add(make_sample(versions, reward=1.0))
    assert (totals.metrics()["weight_version/min"], totals.metrics()["weight_version/max"]) == (3, 4)


async def test_only_data_sets_that_are_named_are_evaluated_and_the_mean_is_of_all():
    bench = Bench(sets={"often": 2, "rarely": 3})
    rare = await bench.evaluator.run(1, ["often"])
    assert {key for key in rare if key.endswith("/samples")} == {"eval/often/samples"}
    assert "eval/reward" not in rare
    both = await bench.evaluator.run(4, ["often", "rarely"])
    assert (both["eval/often/samples"], both["eval/rarely/samples"], both["eval/reward"]) == (2, 3, 1.0)
    assert (await bench.evaluator.run(2)).keys() == both.keys()
