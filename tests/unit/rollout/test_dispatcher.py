"""The dispatcher: who fails costs what, and the pool never drains."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from miles_async.api import Reward
from miles_async.arguments import RolloutArguments
from miles_async.errors import (
    DataError,
    RequestRejectedError,
    RewardError,
    ServiceOutageError,
    ServiceUnavailableError,
    StalledError,
    TransientEngineError,
    first_error,
)
from miles_async.rewards.guard import GuardedGroupReward, GuardedReward
from miles_async.rollout.checkpoint import read_snapshot, write_snapshot
from miles_async.rollout.concurrency import Concurrency
from miles_async.rollout.dispatcher import Dispatcher, Hooks
from miles_async.rollout.generate import SingleTurnGenerate
from miles_async.rollout.teacher import Teacher
from miles_async.runtime import services
from miles_async.runtime.clock import now
from miles_async.runtime.services import Services
from miles_async.seams import Resumption
from miles_async.simulation.virtual_time import run_in_virtual_time
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.staleness.versions import OldestVersions
from miles_async.types import (
    Attempt,
    Changes,
    FinishReason,
    Float32,
    GenerateRequest,
    Generation,
    Group,
    Prompt,
    Sample,
    SettingValue,
)
from tests.fakes.fake_sides import FakeEngineLoads
from tests.fakes.text_of_tokens import TextOfTokens
from tests.property.builders import make_generation

BATCH = 2
ARRAYS = {name: None for name in ("tokens", "loss_mask", "rollout_logprobs", "weight_versions")}


class Prompts:
    """An endless source: p0, p1, ..."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        taken = []
        for _ in range(count):
            taken.append((0, Prompt(prompt_id=f"p{self.taken}", token_ids=(1, 2), text="", label="a")))
            self.taken += 1
        return taken

    def state(self) -> dict[str, object]:
        return {}


class Engine:
    """EngineClient that answers three tokens of ``version``; ``fail(prompt call number)`` may return an error."""

    def __init__(self) -> None:
        self.version = 0
        self.calls = 0
        self.hangs_after = 1 << 30  # requests
        self.seconds = 0.0
        self.requests: list[tuple[list[int], int]] = []  # (input ids, max new tokens)
        self.dispatched: dict[str, int] = {}  # routing key → version, of requests in flight
        self.gate = asyncio.Event()  # while it is clear, requests wait on the client
        self.gate.set()
        self.script: Callable[[int], Exception | Generation | None] = lambda call: None

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append((request.input_ids.tolist(), request.sampling["max_new_tokens"]))
        hangs = len(self.requests) > self.hangs_after
        await self.gate.wait()
        self.dispatched[request.routing_key] = self.version
        try:
            await asyncio.sleep(3600 if hangs else self.seconds)
        finally:
            del self.dispatched[request.routing_key]
        call, self.calls = self.calls, self.calls + 1
        scripted = self.script(call)
        if isinstance(scripted, Exception):
            raise scripted
        return scripted or answer([7, 8, 2], self.version)


def answer(tokens: list[int], version: int, finish_reason: FinishReason = "stop") -> Generation:
    return make_generation(tokens, version, finish_reason, engines=("engine-0",), prompt_tokens=2)


async def reward(prompt: Prompt, sample: Sample) -> float:
    return 1.0


Generating = Callable[[Engine, Attempt, int], Awaitable[Sample]]


async def plainly(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
    """A user's Generate around the default one."""
    return await generate(client, attempt, index)


class Bench:
    def __init__(self, **options: Any) -> None:
        self.engine, self.source = Engine(), options.pop("source", None) or Prompts()
        self.services = circuits = Services(outage_timeout=options.pop("outage_timeout", 60.0))
        oldest = OldestVersions(self.engine.dispatched.get)
        decoder = TextOfTokens(lambda ids: "".join(map(str, ids)))
        generate = SingleTurnGenerate({"max_new_tokens": 6}, decoder, began=oldest.note)
        hooks = Hooks(
            generate=partial(options.pop("around", plainly), generate),
            reward=GuardedReward(
                options.pop("reward", reward), options.pop("reward_timeout", 60.0), circuits.circuit("rewards")
            ),
            group_reward=GuardedGroupReward(
                group_reward, options.pop("group_reward_timeout", 60.0), circuits.circuit("group rewards")
            )
            if (group_reward := options.pop("group_reward", None))
            else None,
            group_filter=options.pop("group_filter", None),
            service=circuits.circuit("generation"),
            teach=Teacher(score, circuits.circuit("teacher")) if (score := options.pop("score", None)) else None,
        )
        stall_timeout = options.pop("stall_timeout", 10.0)
        dead_letters = options.pop("dead_letters", None)
        self.dispatcher = Dispatcher(
            pool=Pool(
                StalenessPolicy(
                    bound=options.pop("bound", 1),
                    lead_batches=options.pop("lead", 2),
                    batch_size=BATCH,
                    action="recycle",
                    min_samples=options.get("min_samples"),
                ),
                RetryPolicy(
                    max_prompt_attempts=2,
                    max_quarantined_prompts=options.pop("quarantine", 3),
                    recycle_stale=True,
                ),
                total_groups=options.pop("total_groups", None),
            ),
            source=self.source,  # type: ignore[arg-type]
            client=self.engine,
            hooks=hooks,
            min_samples=options.pop("min_samples", None),
            arguments=RolloutArguments(**{"n_samples_per_prompt": 2, "max_sample_failures": 2, **options}),
            concurrency=Concurrency(FakeEngineLoads(), RolloutArguments()),
            visible_version=lambda: self.engine.version,
            stall_timeout=stall_timeout,
            services=circuits,
            oldest_versions=oldest,
            dead_letters=dead_letters,
        )

    async def publish(self, version: int) -> None:
        self.engine.version = version
        await self.dispatcher.commit(version)

    def balance(self) -> dict[str, int]:
        return self.dispatcher.pool.balance().summary()


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as scope:
        producer = scope.create_task(bench.dispatcher.run())
        await bench.publish(0)
        yield bench
        producer.cancel()


async def failure_of(bench: Bench) -> BaseException:
    """The error that ends a run whose trainer waits for its first batch."""
    with pytest.raises(ExceptionGroup) as caught:
        async with running(bench):
            await bench.dispatcher.cut(0)
    return first_error(caught.value)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, however slow the machine is."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110, the pool is pure and tells nobody
            await asyncio.sleep(0.001)


async def test_nothing_is_generated_before_a_version_is_visible() -> None:
    bench = Bench()
    async with asyncio.TaskGroup() as scope:
        producer = scope.create_task(bench.dispatcher.run())
        await asyncio.sleep(0.02)
        assert bench.engine.calls == 0
        producer.cancel()


async def test_lead_is_bounded_while_nobody_trains() -> None:
    # covers: P1, C4
    async with running(Bench()) as bench:
        await until(lambda: bench.balance()["buffered"] == 2 * BATCH)
        await asyncio.sleep(0.05)
        assert bench.balance()["issued"] == 2 * BATCH


async def test_trained_groups_make_room_when_their_version_is_visible() -> None:
    # covers: C4
    async with running(Bench()) as bench:
        groups = await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["issued"] == 2 * BATCH)
        bench.dispatcher.pool.trained(groups, 0)
        await asyncio.sleep(0.05)
        assert bench.balance()["issued"] == 2 * BATCH
        await bench.publish(1)
        await until(lambda: bench.balance()["issued"] == 3 * BATCH)


async def test_nothing_is_generated_that_no_step_will_train() -> None:
    # covers: R5, P6
    async with running(Bench(total_groups=3)) as bench:
        groups = await bench.dispatcher.cut(0)
        bench.dispatcher.pool.trained(groups, 0)
        await bench.publish(1)
        await until(lambda: bench.balance()["buffered"] == 1)
        await asyncio.sleep(0.05)
        assert bench.balance()["issued"] == bench.source.taken == 3  # a prompt is taken when there is room for it


async def test_attempts_of_one_prompt_in_overlapping_epochs_are_never_mixed() -> None:
    # covers: R8
    class OnePrompt(Prompts):
        def take(self, count: int) -> list[tuple[int, Prompt]]:
            prompt = Prompt(prompt_id="p0", token_ids=(1, 2), text="", label="a")
            self.taken += count
            return [(self.taken - count + number, prompt) for number in range(count)]

    async def signed(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        sample = await generate(client, attempt, index)
        return msgspec.structs.replace(sample, text=f"attempt {attempt.attempt_id}")

    async with running(Bench(source=OnePrompt(), around=signed)) as bench:
        bench.engine.seconds = 0.005
        groups = await bench.dispatcher.cut(0)
    assert {group.attempt.prompt.prompt_id for group in groups} == {"p0"}
    assert (
        len({group.attempt.epoch for group in groups}) == len({group.attempt.attempt_id for group in groups}) == BATCH
    )
    for group in groups:
        assert {sample.text for sample in group.samples} == {f"attempt {group.attempt.attempt_id}"}


async def test_resume_has_finished_groups_and_owes_every_prompt_that_was_in_flight(tmp_path: Path) -> None:
    # covers: C9, R11
    bench = Bench()
    bench.engine.hangs_after = 2 * (2 * BATCH - 1)  # the last group, p3, never ends
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["buffered"] == 1)
        bench.dispatcher.pool.trained(groups, 0)
        snapshot = await bench.dispatcher.snapshot()
        write_snapshot(tmp_path, snapshot)
        (finished,) = snapshot.pool.groups
    resumed = Bench(num_rollout=2, rollout_batch_size=BATCH)
    resumed.source.taken = bench.source.taken
    resumed.dispatcher.restore(read_snapshot(tmp_path).pool, Resumption(step=1, version=0))
    async with running(resumed):
        await until(lambda: resumed.balance()["buffered"] == BATCH)
        first, second = await resumed.dispatcher.cut(0)
    assert resumed.engine.calls == 2  # the samples of one group
    assert (first.attempt, second.attempt.prompt.prompt_id) == (finished.attempt, "p3")
    assert second.attempt.attempt_id > 3  # a new attempt
    for before, after in zip(finished.samples, first.samples, strict=True):
        assert msgspec.structs.replace(after, **ARRAYS) == msgspec.structs.replace(before, **ARRAYS)
        for name in ARRAYS:
            assert np.array_equal(getattr(before, name), getattr(after, name))
            assert getattr(before, name).dtype == getattr(after, name).dtype
    assert resumed.balance()["trained"] == BATCH


async def test_groups_that_are_too_old_at_a_resume_are_generated_again() -> None:
    # covers: C1, C9
    async with running(Bench()) as bench:
        await until(lambda: bench.balance()["buffered"] == 2 * BATCH)
        snapshot = await bench.dispatcher.snapshot()
    resumed = Bench()
    resumed.dispatcher.restore(snapshot.pool, Resumption(step=0, version=2))  # K = 1
    balance = resumed.balance()
    assert (balance["buffered"], balance["cancelled"], balance["recycled"]) == (0, 2 * BATCH, 0)
    async with running(resumed):
        await until(lambda: resumed.balance()["issued"] == 4 * BATCH)
    assert resumed.source.taken == 0  # the same prompts again


async def test_a_group_goes_on_without_its_failed_samples() -> None:
    # covers: C7
    bench = Bench(n_samples_per_prompt=4, min_samples=3)
    bench.engine.script = lambda call: RequestRejectedError("too long") if call == 1 else None
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
    assert sorted(len(group.samples) for group in groups) == [3, 4]
    assert bench.balance()["failed"] == 0

    bench = Bench(n_samples_per_prompt=4, min_samples=3)
    bench.engine.script = lambda call: RequestRejectedError("too long") if call in (1, 2) else None
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
        assert {len(group.samples) for group in groups} == {4}
        assert bench.balance()["failed"] == 1


async def test_rewarded_samples_get_the_log_probs_of_a_teacher() -> None:
    async def score(tokens: Sequence[int], first: int) -> Float32:
        assert (list(tokens), first) == ([1, 2, 7, 8, 2], 2)
        return np.array([-1.0, -2.0, -3.0], np.float32)

    async with running(Bench(score=score)) as bench:
        groups = await bench.dispatcher.cut(0)
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.teacher_logprobs is not None
        assert sample.teacher_logprobs.tolist() == [0.0, 0.0, -1.0, -2.0, -3.0]
        assert sample.reward == 1.0


async def test_a_teacher_that_cannot_score_a_sample_costs_the_sample_and_one_that_is_down_nothing() -> None:
    # covers: C6, C7
    calls = 0

    async def score(tokens: Sequence[int], first: int) -> Float32:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RequestRejectedError("too long for the teacher")
        if calls < 6:
            raise ServiceUnavailableError("no engine is up")
        return np.zeros(3, np.float32)

    bench = Bench(score=score, n_samples_per_prompt=4, min_samples=3)
    async with running(bench):
        await until(lambda: bench.balance()["buffered"] == 2 * BATCH)
        groups = [*(await bench.dispatcher.cut(0)), *(await bench.dispatcher.cut(0))]
    assert sorted(len(group.samples) for group in groups) == [3, 4, 4, 4]
    assert bench.balance()["failed"] == 0
    assert bench.engine.calls == 4 * 2 * BATCH  # nothing was generated twice


async def test_stale_groups_are_swept_at_the_cut_and_their_prompts_come_again() -> None:
    # covers: C1, C3, C5, O2
    async with running(Bench()) as bench:
        await until(lambda: bench.balance()["buffered"] == 2 * BATCH)
        bench.engine.version = 2
        groups = await bench.dispatcher.cut(2)
        assert [group.oldest_version for group in groups] == [2, 2]
        assert {group.attempt.prompt.prompt_id for group in groups} <= {"p0", "p1", "p2", "p3"}
        assert bench.balance()["recycled"] == 2 * BATCH
        assert bench.source.taken == 2 * BATCH  # retries come before fresh prompts


async def test_an_attempt_in_flight_that_is_too_old_is_aborted_and_replaced_once() -> None:
    # covers: C1, C2, C3, C5
    bench = Bench()
    bench.engine.hangs_after = 0
    async with running(bench):
        await until(lambda: len(bench.engine.dispatched) == 4 * BATCH)  # two samples each
        bench.engine.version, bench.engine.hangs_after = 2, 1 << 30
        groups = await bench.dispatcher.cut(2)
        assert [group.oldest_version for group in groups] == [2, 2]
        assert [group.attempt.stale_count for group in groups] == [1, 1]
        balance = bench.dispatcher.pool.balance()
        assert balance.ended["stale_recycled"] == balance.aborted == 2 * BATCH
        assert balance.reasons == {"stale_recycled: aborted at age 2": 2 * BATCH}
        assert balance.issued == 4 * BATCH
        assert bench.dispatcher.concurrency.slots.in_use <= 2 * BATCH * 2
        bench.dispatcher.pool.check()


async def test_prompts_of_aborted_attempts_come_again_though_the_cut_waited_for_nothing() -> None:
    # covers: C1, C2, C3, P3
    later = asyncio.Event()

    async def hang_or_wait(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        hangs = attempt.prompt.prompt_id in ("p0", "p1") and attempt.stale_count == 0
        if not hangs:
            await later.wait()
        client.hangs_after = 0 if hangs else 1 << 30
        return await generate(client, attempt, index)

    async with running(Bench(around=hang_or_wait)) as bench:
        await until(lambda: len(bench.engine.dispatched) == 2 * BATCH)
        bench.engine.version = 2
        later.set()
        await until(lambda: bench.balance()["buffered"] == BATCH)
        groups = await bench.dispatcher.cut(2)
        assert {group.attempt.prompt.prompt_id for group in groups} == {"p2", "p3"}
        await until(lambda: bench.balance()["buffered"] == BATCH)
        bench.dispatcher.pool.check()


async def test_an_attempt_in_flight_that_may_be_trained_goes_on() -> None:
    # covers: C5
    bench = Bench()
    bench.engine.gate.clear()  # nothing was dispatched, so everything may turn out to be of any version
    async with running(bench):
        await until(lambda: len(bench.engine.requests) == 4 * BATCH)
        bench.engine.version = 2
        cut = asyncio.ensure_future(bench.dispatcher.cut(2))
        await asyncio.sleep(0.02)
        bench.engine.gate.set()
        assert [group.attempt.stale_count for group in await cut] == [0, 0]
        assert bench.balance()["issued"] == 2 * BATCH
        bench.engine.hangs_after = 0
        bench.dispatcher.pool.trained(tuple(await bench.dispatcher.cut(2)), 2)
        await bench.publish(3)  # age 1 is fresh
        await until(lambda: len(bench.engine.dispatched) == 2 * BATCH)
        cut = asyncio.ensure_future(bench.dispatcher.cut(4))
        await asyncio.sleep(0.02)
        assert bench.dispatcher.pool.balance().aborted == 0
        cut.cancel()


async def test_a_group_goes_on_without_its_samples_in_flight_that_are_too_old() -> None:
    # covers: C5, C7
    bench = Bench(min_samples=1, total_groups=1)
    first: list[str] = []

    def again(call: int) -> Exception | None:
        return TransientEngineError("lost") if call == 0 else None

    plain = bench.engine.generate

    async def one_hangs(request: GenerateRequest) -> Generation:
        first.append(request.routing_key)
        if len(first) == 1:
            bench.engine.dispatched[request.routing_key] = 0
            await asyncio.Event().wait()
        return await plain(request)

    bench.engine.script, bench.engine.generate = again, one_hangs  # type: ignore[assignment, method-assign]
    bench.engine.seconds = 0.05
    async with running(bench):
        await until(lambda: len(first) == 2)
        bench.engine.version = 2  # where the other sample begins again
        await until(lambda: bench.engine.dispatched.get(first[1]) == 2)
        cut = asyncio.ensure_future(bench.dispatcher.cut(2))
        await until(lambda: bench.balance()["buffered"] == 1)
        (group,) = bench.dispatcher.pool.snapshot().groups
        assert (len(group.samples), group.aborted, group.oldest_version) == (1, 1, 2)
        assert bench.dispatcher.pool.balance().aborted == 0
        cut.cancel()


@pytest.mark.parametrize("error", [TransientEngineError("lost"), ServiceUnavailableError("down")], ids=["lost", "down"])
async def test_nothing_of_a_lost_try_is_held_against_the_next(error: Exception) -> None:
    # covers: C5, C6
    bench = Bench(n_samples_per_prompt=1, total_groups=BATCH)
    slots = bench.dispatcher.concurrency.slots

    def lost_halfway(call: int) -> Exception | Generation | None:
        if call < BATCH:
            return answer([7], 0, "abort")  # kept, as of version 0
        if call < 2 * BATCH:
            slots.resize(0)  # so that the next try has to wait
            return error
        return None

    bench.engine.script = lost_halfway
    bench.engine.gate.clear()
    async with running(bench):
        await until(lambda: len(bench.engine.requests) == BATCH)
        bench.engine.gate.set()
        await until(lambda: bench.engine.calls == 2 * BATCH)
        await until(lambda: slots.in_use == 0)
        bench.engine.version = 2
        cut = asyncio.ensure_future(bench.dispatcher.cut(2))
        await asyncio.sleep(0.02)
        assert bench.dispatcher.pool.balance().aborted == 0
        slots.resize(8)
        assert [group.oldest_version for group in await cut] == [2, 2]
        assert bench.balance()["issued"] == BATCH


async def test_a_generate_that_does_not_let_itself_be_aborted_counts_once() -> None:
    # covers: C2, C3
    begun, ended = list[str](), list[int]()

    async def stubborn(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        """Its first requests end only when they are cancelled: one with a sample, the other with an error."""
        if client.version == 0:
            key = f"{attempt.attempt_id}-{index}"
            begun.append(key)
            client.dispatched[key] = 0
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(index)
                if index:
                    raise RuntimeError("could not close") from None
        return await generate(client, attempt, index)

    bench = Bench(around=stubborn, quarantine=10)
    async with running(bench):
        await until(lambda: len(begun) == 4 * BATCH)
        bench.engine.version = 2
        await bench.dispatcher.cut(2)
        await until(lambda: len(ended) == 4 * BATCH)
        bench.dispatcher.pool.check()
        assert bench.dispatcher.pool.balance().aborted == 2 * BATCH
        assert bench.balance()["failed"] == 0


async def test_failing_sample_is_generated_again_alone() -> None:
    # covers: C6
    bench = Bench()
    bench.engine.script = lambda call: TransientEngineError("connection cut") if call == 0 else None
    async with running(bench):
        await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["buffered"] == BATCH)
    assert bench.engine.calls == 2 * 2 * BATCH + 1
    assert bench.balance()["failed"] == 0


@pytest.mark.parametrize("logprob", [np.nan, -np.inf, np.inf, np.finfo(np.float32).min])
async def test_a_log_prob_that_is_none_costs_the_sample_s_try(logprob: float) -> None:  # covers: C12
    """The engine client refuses most of them; a Generate of the user may let them in."""
    bench = Bench()
    bench.engine.script = lambda call: (
        msgspec.structs.replace(answer([7, 8, 2], 0), logprobs=np.array([-0.5, logprob, -0.5], np.float32))
        if call == 1
        else None
    )
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
    assert all(np.isfinite(sample.rollout_logprobs).all() for group in groups for sample in group.samples)
    assert bench.balance()["failed"] == 0
    assert bench.engine.calls >= 2 * BATCH + 1  # that sample again, alone


async def test_prompt_that_always_fails_is_quarantined_and_the_run_goes_on() -> None:
    # covers: C6, M8
    bench = Bench(reward=fail_for("p1"))
    async with running(bench):
        groups = [*await bench.dispatcher.cut(0)]
        bench.dispatcher.pool.trained(tuple(groups), 0)
        await bench.publish(1)
        groups += await bench.dispatcher.cut(1)
    assert "p1" not in {group.attempt.prompt.prompt_id for group in groups}
    assert bench.balance()["quarantined"] == 1
    assert bench.balance()["failed"] == 1
    [letter] = bench.dispatcher.pool.dead_letters
    assert letter.prompt_id == "p1"
    assert len(letter.reasons) == 2


async def test_dead_letters_are_appended_to_their_file_as_they_come(tmp_path: Path) -> None:
    # covers: C6
    path = tmp_path / "dead_letters.jsonl"
    path.write_text("of an earlier process\n")
    bench = Bench(reward=fail_for("p1"), dead_letters=path)
    async with running(bench):
        await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["quarantined"] == 1)
        await until(lambda: "p1" in path.read_text())
    earlier, letter = path.read_text().splitlines()
    assert earlier == "of an earlier process"
    assert json.loads(letter)["prompt_id"] == "p1"
    assert len(json.loads(letter)["reasons"]) == 2
    assert bench.dispatcher.pool.dead_letters == []


def fail_for(prompt_id: str) -> Reward:
    async def failing(prompt: Prompt, sample: Sample) -> float:
        if prompt.prompt_id == prompt_id:
            raise ZeroDivisionError("bad label")
        return 1.0

    return failing


async def test_while_a_reward_is_not_to_be_had_its_sample_waits_and_nothing_else() -> None:
    # covers: C6
    asked: list[str] = []

    async def down_at_first(prompt: Prompt, sample: Sample) -> float:
        asked.append(sample.text)
        if len(asked) <= 2:
            raise ServiceUnavailableError("connection refused")
        return 1.0

    bench = Bench(reward=down_at_first, total_groups=BATCH)
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
        bench.dispatcher.pool.trained(groups, 0)
    assert bench.engine.calls == 2 * BATCH  # nothing was generated again
    assert len(asked) == 2 * BATCH + 2
    assert bench.balance()["failed"] == 0


async def test_a_reward_whose_service_answers_others_is_the_samples_own_failure() -> None:
    # covers: C6
    async def down(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0.001)
        if prompt.prompt_id == "p1":
            raise TimeoutError("its own doing")
        return 1.0

    bench = Bench(reward=down, bound=None, lead=1000)
    bench.services.circuit("rewards")._max_failures = 0
    async with running(bench):
        await until(lambda: bench.balance()["failed"] >= 1)
    assert bench.balance()["quarantined"] == 0


async def test_an_outage_longer_than_the_limit_ends_the_run_with_the_service() -> None:
    # covers: C10
    async def down(prompt: Prompt, sample: Sample) -> float:
        raise ConnectionRefusedError("nobody listens")

    bench = Bench(reward=down, outage_timeout=0.5)
    error = await failure_of(bench)
    assert isinstance(error, ServiceOutageError)
    assert "expected rewards to be back within 0.5 s" in str(error)
    assert bench.engine.calls == 2 * 2 * BATCH


async def test_failures_of_the_infrastructure_never_quarantine_a_prompt() -> None:
    # covers: C6
    bench = Bench(quarantine=0)
    bench.engine.script = lambda call: TransientEngineError("connection cut") if call < 60 else None
    async with running(bench):
        await bench.dispatcher.cut(0)
    assert bench.balance()["failed"] >= 4
    assert bench.balance()["quarantined"] == 0


FOREIGN = [KeyError("tool"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("error", FOREIGN)
@pytest.mark.parametrize("min_samples", [None, 1])
async def test_whatever_a_generate_raises_costs_its_attempt_only(error: BaseException, min_samples: int | None) -> None:
    # covers: C6, C7
    calls = 0

    async def fails_once(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        return await generate(client, attempt, index)

    bench = Bench(around=fails_once, min_samples=min_samples)
    async with running(bench):
        await until(lambda: bench.balance()["buffered"] == 2 * BATCH)
        sizes = sorted(len(group.samples) for group in await bench.dispatcher.cut(0))
    assert bench.balance()["failed"] == (1 if min_samples is None else 0)
    assert sizes == ([2, 2] if min_samples is None else [1, 2])


async def reasons_of_quarantine(bench: Bench, prompts: int = 1) -> str:
    """Cut a batch in spite of prompts that fail, and return why these are quarantined."""
    async with running(bench):
        await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["quarantined"] == prompts)
    assert len(bench.dispatcher.pool.dead_letters) == prompts
    return str([letter.reasons for letter in bench.dispatcher.pool.dead_letters])


@pytest.mark.parametrize("value", [object(), 2**64, "\ud83d", {"turns": [1j]}])
async def test_metadata_that_cannot_be_saved_costs_its_attempt_only(value: object) -> None:
    async def noting(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        sample = await generate(client, attempt, index)
        metadata = {"agent_turns": value if attempt.prompt.prompt_id == "p0" else 3}
        return msgspec.structs.replace(sample, metadata=metadata)

    assert "metadata cannot be saved" in await reasons_of_quarantine(Bench(around=noting))


async def test_a_generate_that_leaves_a_prompt_that_cannot_be_saved_costs_its_attempt_only() -> None:
    async def noting(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        if attempt.prompt.prompt_id == "p0":
            attempt.prompt.metadata["state"] = {"game": object()}  # type: ignore[index]
        return await generate(client, attempt, index)

    left = "generate left a Prompt whose metadata cannot be saved: ['state']['game']: expected plain data"
    assert left in (await reasons_of_quarantine(Bench(around=noting))).replace("\\", "")


@pytest.mark.parametrize("error", FOREIGN)
async def test_whatever_a_generate_reward_or_filter_always_raises_quarantines_its_prompt(error: BaseException) -> None:
    # covers: C6
    async def failing(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        if attempt.prompt.prompt_id == "p2":
            raise error
        return await generate(client, attempt, index)

    async def rewards(prompt: Prompt, sample: Sample) -> float:
        if prompt.prompt_id == "p0":
            raise error
        return 1.0

    def filters(group: Group) -> str | None:
        if group.attempt.prompt.prompt_id == "p1":
            raise error
        return None

    bench = Bench(around=failing, reward=rewards, group_filter=filters)
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["quarantined"] == 3)
    assert {len(group.samples) for group in groups} == {2}
    assert {letter.prompt_id for letter in bench.dispatcher.pool.dead_letters} == {"p0", "p1", "p2"}
    assert type(error).__name__ in str(bench.dispatcher.pool.dead_letters)


async def test_a_generate_or_filter_that_returns_something_else_is_told_what_was_expected() -> None:
    # covers: C6
    async def forgetful(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample | None:
        return None if attempt.prompt.prompt_id == "p0" else await generate(client, attempt, index)

    def keeps(group: Group) -> object:
        return True if group.attempt.prompt.prompt_id == "p1" else None

    reasons = await reasons_of_quarantine(Bench(around=forgetful, group_filter=keeps), prompts=2)
    assert "generate returned None, expected a Sample" in reasons
    assert "group filter returned True, expected None or the reason, a text" in reasons


@pytest.mark.parametrize("name", ["tokens", "rollout_logprobs", "loss_mask", "weight_versions"])
async def test_a_filter_cannot_change_what_is_trained_on(name: str) -> None:
    # covers: C6
    def changes(group: Group) -> None:
        if group.attempt.prompt.prompt_id == "p0":
            getattr(group.samples[0], name)[-1:] = 0

    assert "group filter raised ValueError" in await reasons_of_quarantine(Bench(group_filter=changes))


async def test_what_a_filter_changes_all_the_same_is_named() -> None:
    # covers: C6
    def changes(group: Group) -> None:
        if group.attempt.prompt.prompt_id == "p0":
            group.samples[1].rollout_logprobs.flags.writeable = True
            group.samples[1].rollout_logprobs[-1] = -7.5

    changed = "group filter changed rollout_logprobs of a sample in place"
    assert changed in await reasons_of_quarantine(Bench(group_filter=changes))


@pytest.mark.parametrize("error", [ValueError, RewardError])
async def test_reasons_are_bounded_whatever_the_length_of_an_error_or_a_filter_s_reason(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    async def rewards(prompt: Prompt, sample: Sample) -> float:
        if prompt.prompt_id == "p0":
            raise error("x" * 1_000_000)
        return 1.0

    def filters(group: Group) -> str | None:
        return "y" * 1_000_000 if group.attempt.prompt.prompt_id == "p1" else None

    reasons: list[str] = []
    bench = Bench(reward=rewards, group_filter=filters)
    filtered = bench.dispatcher.pool.filtered

    def noted(attempt: Attempt, reason: str, group: Group) -> None:
        reasons.append(reason)
        filtered(attempt, reason, group)

    monkeypatch.setattr(bench.dispatcher.pool, "filtered", noted)
    async with running(bench):
        await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["quarantined"] == 1 and bool(reasons))
    (letter,) = bench.dispatcher.pool.dead_letters
    for reason in (*letter.reasons, *reasons):
        assert len(reason) < 5000
        assert "characters left out" in reason


async def test_while_a_service_that_generation_needs_is_down_one_sample_at_a_time_tries_it() -> None:
    # covers: C6
    down, tries = True, 0

    async def unreachable(generate: Generating, client: Engine, attempt: Attempt, index: int) -> Sample:
        nonlocal tries
        tries += 1
        if down:
            raise ConnectionRefusedError("the tool server")
        return await generate(client, attempt, index)

    bench = Bench(around=unreachable, quarantine=0)
    async with running(bench):
        await asyncio.sleep(1.0)
        assert tries < 4 * BATCH + 8
        assert bench.dispatcher.concurrency.slots.in_use <= 1  # who waits for a service holds no slot
        down = False
        await bench.dispatcher.cut(0)
    assert bench.balance()["failed"] == 0


async def test_too_many_quarantined_prompts_stop_the_run() -> None:
    bench = Bench(quarantine=1)
    bench.engine.script = lambda call: RequestRejectedError("too long")
    assert isinstance(await failure_of(bench), DataError)


async def test_filtered_groups_are_counted_and_replaced() -> None:
    # covers: C3
    def no_even(group: Group) -> str | None:
        return "even" if int(group.attempt.prompt.prompt_id[1:]) % 2 == 0 else None

    async with running(Bench(group_filter=no_even)) as bench:
        groups = await bench.dispatcher.cut(0)
        assert [group.attempt.prompt.prompt_id for group in groups] == ["p1", "p3"]
        assert bench.balance()["filtered"] >= 2


async def test_aborted_generation_keeps_its_tokens_and_their_versions() -> None:
    # covers: R2, C1
    bench = Bench(bound=None)
    bench.engine.script = lambda call: answer([5, 6], 0, "abort") if call == 0 else answer([7, 2], 3)
    async with running(bench):
        groups = await bench.dispatcher.cut(3)
    mixed = [sample for group in groups for sample in group.samples if len(sample.tokens) == 6]
    assert [sample.tokens.tolist() for sample in mixed] == [[1, 2, 5, 6, 7, 2]]
    assert mixed[0].weight_versions.tolist() == [-1, -1, 0, 0, 3, 3]
    assert groups[0].oldest_version == 0
    assert ([1, 2, 5, 6], 4) in bench.engine.requests  # it goes on from what it has, within what is left


async def test_abort_at_the_length_limit_is_the_end() -> None:
    bench = Bench()
    bench.engine.script = lambda call: answer([5, 6, 7, 8, 9, 9], 0, "abort") if call == 0 else None
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
    assert "length" in {sample.finish_reason for group in groups for sample in group.samples}
    assert min(budget for _, budget in bench.engine.requests) == 6


async def test_a_service_that_answers_nobody_in_time_never_quarantines_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # covers: C6
    monkeypatch.setattr(services, "_LONGEST_PAUSE", 0.1)

    async def hang(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(60)
        return 1.0

    bench = Bench(reward=hang, reward_timeout=0.02, quarantine=0)
    async with running(bench):
        await until(lambda: bench.balance()["failed"] > 2 * BATCH)  # so that one has failed twice
    assert bench.balance()["quarantined"] == 0


async def test_reward_that_hangs_costs_its_attempt_only() -> None:
    async def hang(prompt: Prompt, sample: Sample) -> float:
        if prompt.prompt_id == "p0":
            await bench.services.circuit("rewards").call(partial(reward, prompt, sample))  # others are answered
            await asyncio.sleep(60)
        return 1.0

    bench = Bench(reward=hang, reward_timeout=0.02)
    async with running(bench):
        await bench.dispatcher.cut(0)
        await until(lambda: bench.balance()["quarantined"] == 1)
    assert bench.balance()["trained"] == 0


async def test_stall_says_who_waits_for_whom() -> None:
    # covers: C10
    bench = Bench(stall_timeout=0.3)
    bench.engine.hangs_after = 0
    error = await failure_of(bench)
    assert isinstance(error, StalledError)
    assert "the trainer waits for a batch" in str(error)
    assert "--stall-timeout): 4 attempts in flight, 0 groups buffered" in str(error)


def test_full_pool_is_no_stall_the_trainer_is_just_slow() -> None:
    # covers: C10, P3
    async def main() -> None:
        async with running(Bench(total_groups=BATCH, stall_timeout=10.0)) as bench:  # as with a lead of one batch
            groups = await bench.dispatcher.cut(0)
            waiting = asyncio.ensure_future(bench.dispatcher.cut(1))
            await asyncio.sleep(25.0)
            assert not waiting.done()
            waiting.cancel()
            bench.dispatcher.pool.trained(groups, 0)

    run_in_virtual_time(main())


def test_commit_restarts_the_stall_timer() -> None:
    # covers: C10
    async def main() -> None:
        async with running(Bench(bound=0, stall_timeout=10.0)) as bench:
            bench.engine.seconds = 5.0
            groups = await bench.dispatcher.cut(0)
            bench.dispatcher.pool.trained(groups, 0)
            waiting = asyncio.ensure_future(bench.dispatcher.cut(1))
            await asyncio.sleep(9.0)  # of 10 until a stall
            await bench.publish(1)
            assert len(await waiting) == BATCH

    run_in_virtual_time(main())


def test_a_group_that_finishes_restarts_the_stall_timer_and_so_does_a_service_that_is_back() -> None:
    # covers: C6, C10
    async def stalls_at(*, groups: int = 0, back_at: float = -math.inf) -> float:
        """Seconds until the stall of a cut that waits for two groups and gets ``groups``, all after 4 s."""
        bench = Bench(stall_timeout=10.0)
        bench.engine.hangs_after = groups * 2
        bench.engine.seconds = 4.0
        bench.services.paused_until = lambda: min(now(), back_at)
        assert isinstance(await failure_of(bench), StalledError)
        return now()

    assert run_in_virtual_time(stalls_at()) == 10.0
    assert run_in_virtual_time(stalls_at(groups=1)) == 14.0
    assert run_in_virtual_time(stalls_at(back_at=9.5)) == 19.5


async def test_filter_that_rejects_everything_stalls() -> None:
    # covers: C3, C10
    bench = Bench(group_filter=lambda group: "never good enough", stall_timeout=0.3)
    assert isinstance(await failure_of(bench), StalledError)


async def test_source_with_quarantined_prompts_only_is_an_error_that_says_so() -> None:
    bench = Bench(reward=fail_for("p0"), quarantine=100)
    bench.source.take = lambda count: [(0, Prompt(prompt_id="p0", token_ids=(1,), text=""))]  # type: ignore[method-assign]
    expected = "found only the 1 that are; the last is 'p0': data: reward raised Zero"
    assert expected in str(await failure_of(bench))


async def test_end_of_run_cancels_live_attempts_and_the_balance_adds_up() -> None:
    # covers: C2
    bench = Bench()
    async with running(bench):
        await bench.dispatcher.cut(0)
        await asyncio.sleep(0.02)
    balance = bench.balance()
    assert balance["issued"] == sum(count for name, count in balance.items() if name != "issued")
    assert balance["cancelled"] == balance["issued"]
    assert balance["in_flight"] == balance["buffered"] == balance["cut"] == 0


async def test_of_more_samples_than_a_group_has_the_slowest_are_stopped() -> None:
    # covers: C2, C7
    bench = Bench(extra_samples_per_prompt=2, total_groups=1)
    plain, stopped = bench.engine.generate, []

    async def some_hang(*args: object, **options: object) -> Generation:
        if len(bench.engine.requests) in (0, 2):  # the first and the third
            bench.engine.requests.append(([], 0))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stopped.append(True)
                raise
        return await plain(*args, **options)

    bench.engine.generate = some_hang  # type: ignore[method-assign]
    async with running(bench):
        await until(lambda: bench.balance()["buffered"] == 1)
        assert len(stopped) == 2
        (group,) = bench.dispatcher.pool.snapshot().groups
    assert (len(group.samples), group.stopped) == (2, 2)


async def test_extra_samples_take_the_place_of_failed_ones() -> None:
    # covers: C7
    bench = Bench(extra_samples_per_prompt=1, total_groups=1)
    bench.engine.script = lambda call: RequestRejectedError("too long") if call == 0 else None
    async with running(bench):
        await until(lambda: bench.balance()["buffered"] == 1)
        (group,) = bench.dispatcher.pool.snapshot().groups
    assert (len(group.samples), group.stopped) == (2, 0)
    assert bench.balance()["failed"] == 0


# ------------------------------------------------------------------------------------------- rewards of whole groups
async def by_length(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    """2 for the first, 1 for the second, on top of what they have."""
    return [(sample.reward or 0.0) + len(samples) - index for index, sample in enumerate(samples)]


@pytest.mark.parametrize(("given", "rewards"), [(reward, [3.0, 2.0]), (None, [2.0, 1.0])])
async def test_a_group_reward_sees_all_samples_with_their_rewards_and_decides(
    given: Reward | None, rewards: list[float]
) -> None:
    bench = Bench(group_reward=by_length)
    bench.dispatcher._hooks = replace(bench.dispatcher._hooks, reward=given)
    async with running(bench):
        groups = await bench.dispatcher.cut(0)
    assert [[sample.reward for sample in group.samples] for group in groups] == [rewards] * BATCH


async def test_a_group_without_its_failed_samples_is_rewarded() -> None:
    # covers: C7
    asked = 0

    async def second_fails(prompt: Prompt, sample: Sample) -> float:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RewardError("cannot tell")
        return 1.0

    bench = Bench(min_samples=1, total_groups=1, reward=second_fails, group_reward=by_length)
    async with running(bench):
        await until(lambda: bench.balance()["buffered"] == 1)
        (group,) = bench.dispatcher.pool.snapshot().groups
    assert [sample.reward for sample in group.samples] == [2.0]


async def changes_tokens(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    samples[0].tokens[-1:] = 0
    return [1.0, 1.0]


async def leaves(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    raise SystemExit(3)


def gives(*rewards: Any) -> Callable[[Prompt, Sequence[Sample]], Awaitable[Any]]:
    async def group_reward(prompt: Prompt, samples: Sequence[Sample]) -> Any:
        return rewards[0] if len(rewards) == 1 else rewards

    return group_reward


@pytest.mark.parametrize(
    ("group_reward", "reason"),
    [
        (changes_tokens, "group reward raised ValueError.*read-only"),
        (leaves, r"group reward raised SystemExit\(3\)"),
        (gives(1.0, 2.0, 3.0), r"group reward returned \(1.0, 2.0, 3.0\), expected 2 rewards, one for each sample"),
        (gives({1.0, 2.0}), r"group reward returned \{1.0, 2.0\}, expected 2 rewards"),
        (gives(1.0, None), "group reward returned None, expected a number"),
        (gives(1.0, math.nan), "reward nan: expected a finite number"),
    ],
)
async def test_a_group_reward_that_fails_costs_its_attempt_and_quarantines_a_prompt(
    group_reward: Callable[..., Awaitable[Any]], reason: str
) -> None:
    # covers: C6
    async def of_p1(prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float]:
        return await (group_reward if prompt.prompt_id == "p1" else by_length)(prompt, samples)

    bench = Bench(group_reward=of_p1)
    async with running(bench):
        await until(lambda: bench.balance()["quarantined"] == 1)
    [letter] = bench.dispatcher.pool.dead_letters
    assert letter.prompt_id == "p1"
    assert all(re.search(reason, each) for each in letter.reasons)


async def test_numbers_of_numpy_are_rewards_of_a_group() -> None:
    async with running(Bench(group_reward=gives(np.array([0.25, 0.5], np.float32)))) as bench:
        groups = await bench.dispatcher.cut(0)
    assert {tuple(sample.reward for sample in group.samples) for group in groups} == {(0.25, 0.5)}


async def test_a_group_keeps_its_samples_while_the_service_of_its_reward_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # covers: C6
    monkeypatch.setattr(services, "_SHORTEST_PAUSE", 0.01)
    failures = iter([ConnectionRefusedError("nobody listens")] * 2)

    async def down_at_first(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        if (error := next(failures, None)) is not None:
            raise error
        return await by_length(prompt, samples)

    bench = Bench(group_reward=down_at_first, lead=1)
    async with running(bench):
        await bench.dispatcher.cut(0)
    assert bench.engine.calls == 2 * BATCH  # nothing was generated again
    assert bench.balance()["failed"] == 0


@pytest.mark.parametrize("lost", [True, False])
async def test_a_group_reward_that_hangs_or_lost_its_samples_is_infrastructure(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C6
    monkeypatch.setattr(services, "_LONGEST_PAUSE", 0.1)

    async def fails(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        if lost:
            raise TransientEngineError("the process that played them is gone")
        await asyncio.sleep(60)
        return []

    bench = Bench(group_reward=fails, group_reward_timeout=0.02, quarantine=0)
    async with running(bench):
        await until(lambda: bench.balance()["failed"] > 2 * BATCH)
    assert bench.balance()["quarantined"] == 0


async def test_a_group_that_becomes_too_old_while_it_is_rewarded_is_aborted() -> None:
    # covers: C5
    rewarding, cancelled = 0, 0

    async def slow_at_first(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        nonlocal rewarding, cancelled
        rewarding += 1
        if bench.engine.version == 0:
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled += 1
        return await by_length(prompt, samples)

    bench = Bench(group_reward=slow_at_first)
    async with running(bench):
        await until(lambda: rewarding == 2 * BATCH)
        bench.engine.version = 2
        groups = await bench.dispatcher.cut(2)
        assert [group.oldest_version for group in groups] == [2, 2]
        assert bench.dispatcher.pool.balance().aborted == cancelled == 2 * BATCH


class SlowPrompts(Prompts):
    """Gives a prompt when it may, and counts how many were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_give = 0, threading.Semaphore(0)

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        self.asked += 1
        assert self.may_give.acquire(timeout=60)
        return super().take(count)


@pytest.mark.parametrize("change", [{"max_rollout_lead": 1}, {"generation": "paused"}])
async def test_settings_that_change_while_a_prompt_is_read_hold_for_it(change: dict[str, SettingValue]) -> None:
    # covers: C4
    source = SlowPrompts()
    bench = Bench(source=source, bound=1, lead=2)
    async with running(bench):
        for _ in range(BATCH):
            source.may_give.release()
        await until(lambda: source.asked == BATCH + 1)
        await bench.dispatcher.change(Changes(after=1, before={}, values=change))
        source.may_give.release()
        await until(lambda: not bench.dispatcher.pool.needs_prompt())
        await asyncio.sleep(0.01)  # for the producer to see it
        assert bench.balance()["issued"] == BATCH
        back: dict[str, SettingValue] = {"max_rollout_lead": 2, "generation": "running"}
        await bench.dispatcher.change(Changes(after=1, before={}, values={name: back[name] for name in change}))
        await until(lambda: bench.balance()["issued"] == BATCH + 1)
        for _ in range(BATCH):
            source.may_give.release()
