"""From the pool to the disk: nothing lost, the dispatcher never held up, a full disk an error once.

# covers: C2
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from miles_async.arguments import RolloutArguments
from miles_async.errors import ContractViolation, LedgerError, RequestRejectedError, TransientEngineError
from miles_async.ledger import queued_writer
from miles_async.ledger.reader import open_ledger
from miles_async.ledger.writer import LedgerWriter
from miles_async.rollout.concurrency import Concurrency
from miles_async.rollout.dispatcher import Dispatcher, Hooks
from miles_async.rollout.generate import SingleTurnGenerate
from miles_async.rollout.manager import RolloutManager
from miles_async.runtime.services import Services
from miles_async.seams import Resumption
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.events import Ended, Issued
from miles_async.staleness.ledger import Outcome
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.types import EngineStats, GenerateRequest, Generation, Group, JsonObject, Prompt, Sample
from tests.fakes.fake_sides import FakeEngineLoads
from tests.fakes.text_of_tokens import TextOfTokens
from tests.property.builders import make_attempt
from tests.waiting import until

BATCH = 4


class Prompts:
    """Ten prompts, over and over."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        self.taken += count
        first = self.taken - count
        return [(i // 10, Prompt(prompt_id=f"p{i % 10}", token_ids=(1, 2), text="")) for i in range(first, self.taken)]

    def state(self) -> JsonObject:
        return {"taken": self.taken}

    def restore(self, state: JsonObject) -> Sequence[str]:
        self.taken = state["taken"]
        return ()


class Engines:
    """Engines, router and client in one; each tenth request fails, and each seventh is interrupted."""

    def __init__(self) -> None:
        self.version = 0
        self.calls = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(0)
        self.calls += 1
        if self.calls % 10 == 0:
            raise TransientEngineError("connection cut")
        tokens = [5, 6] if self.calls % 7 == 0 else [7, 8, 2]
        return Generation(
            output_ids=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            weight_versions=np.full(len(tokens), self.version, np.int32),
            finish_reason="abort" if self.calls % 7 == 0 else "stop",
            engines=(f"engine-{self.calls % 2}",),
        )

    async def supervise(self) -> None:
        await asyncio.Event().wait()

    def stats(self) -> EngineStats:
        return EngineStats(
            in_flight=0,
            oldest_request_seconds=0.0,
            busy_seconds=0.0,
            failed_tries=0,
            engines="",
            router={"workers": 2.0},
            restarts={},
        )

    async def stop(self) -> None: ...


async def reward(prompt: Prompt, sample: Sample) -> float:
    if prompt.prompt_id == "p3":
        raise RequestRejectedError("no reward for p3")
    return 0.5


def keep_most(group: Group) -> str | None:
    return "too easy" if group.attempt.prompt.prompt_id == "p4" else None


class Run:
    """A rollout manager with everything real but engines, prompts and train data."""

    def __init__(self, path: Path, *, ledger: LedgerWriter | None = None) -> None:
        self.ledger = ledger or LedgerWriter(path, flush_seconds=0.005)
        self.engines, self.source = Engines(), Prompts()
        self.pool = Pool(
            StalenessPolicy(bound=1, lead_batches=2, batch_size=BATCH, action="recycle"),
            RetryPolicy(max_prompt_attempts=2, max_quarantined_prompts=5, recycle_stale=True),
            observers=[self.ledger.note],
        )
        self.dispatcher = Dispatcher(
            pool=self.pool,
            source=self.source,
            client=self.engines,
            hooks=Hooks(
                generate=SingleTurnGenerate({"max_new_tokens": 8}, TextOfTokens(str)),
                reward=reward,
                group_filter=keep_most,
            ),
            arguments=RolloutArguments(
                num_rollout=20, rollout_batch_size=BATCH, n_samples_per_prompt=2, max_sample_failures=2
            ),
            concurrency=Concurrency(FakeEngineLoads(2), RolloutArguments()),
            visible_version=lambda: self.engines.version,
            stall_timeout=10,
            services=Services(),
        )
        self.manager = RolloutManager(
            engines=self.engines,
            source=self.source,
            dispatcher=self.dispatcher,
            batches=None,  # type: ignore[arg-type]  # this test cuts without making train data
            evaluator=None,
            put=lambda shard: shard,
            writers=(self.ledger,),
        )

    async def publish(self, version: int) -> None:
        self.engines.version = version
        await self.manager.commit_version(version)

    async def train(self, steps: range) -> None:
        """After every third step the version jumps, so that what waits in the buffer then is too old."""
        for step in steps:
            version = self.engines.version
            groups = await self.dispatcher.cut(version)
            self.pool.trained(groups, version)
            if step % 3 == 2:
                await until(lambda: self.pool.balance().buffered > 0)
            await self.publish(version + (3 if step % 3 == 2 else 1))


async def run_steps(run: Run, steps: range) -> None:
    async with asyncio.TaskGroup() as scope:
        running = scope.create_task(run.manager.run())
        await run.publish(run.engines.version)
        await run.train(steps)
        await run.manager.close()
        await running


async def test_after_a_run_the_disk_has_what_the_pool_counted(tmp_path: Path) -> None:
    run = Run(tmp_path / "ledger.sqlite")
    await run_steps(run, range(12))
    assert os.listdir(tmp_path) == ["ledger.sqlite"], "it was not closed"
    balance = run.pool.balance()
    with open_ledger(tmp_path / "ledger.sqlite") as reader:
        assert reader.balance() == balance
        trained = list(reader._records("WHERE step IS NOT NULL"))
        (letter,) = reader.dead_letters()
    assert {outcome for outcome, count in balance.ended.items() if count} >= {
        Outcome.TRAINED, Outcome.FILTERED, Outcome.STALE_RECYCLED, Outcome.FAILED, Outcome.QUARANTINED
    }  # fmt: skip
    assert [sum(record.step == step for record in trained) for step in range(1, 13)] == [BATCH] * 12
    assert all(record.engines and record.target_version - record.oldest_version <= 1 for record in trained)
    assert any(record.chunks > 2 for record in trained)
    assert (letter.prompt_id, len(letter.reasons)) == ("p3", 2)


async def test_a_reason_of_any_length_is_bounded_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    writer = LedgerWriter(path)
    writer.note(Issued(make_attempt(1)))
    writer.note(Ended(1, Outcome.FAILED, "x" * 1_000_000))
    await writer.close()
    assert path.stat().st_size < 200_000


async def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    # covers: C9
    first = Run(tmp_path / "first.sqlite")
    await run_steps(first, range(3))
    await first.manager.snapshot()
    await first.manager.save(tmp_path)
    second = Run(tmp_path / "second.sqlite")
    accepted = ("rope_theta was 1 and is 2",)
    version = first.engines.version
    await second.manager.load(tmp_path, Resumption(step=3, version=version, accepted=accepted))
    second.engines.version = first.engines.version
    await run_steps(second, range(3, 6))
    with open_ledger(tmp_path / "second.sqlite") as reader:
        assert reader.balance() == second.pool.balance()
        assert reader.carried().balance == first.pool.balance()
        assert reader.carried().accepted == accepted
        assert {r.step for r in reader._records("WHERE step IS NOT NULL")} == {4, 5, 6}


async def test_other_prompts_end_the_quarantine_at_a_resume(tmp_path: Path) -> None:
    # covers: C6, C9
    first = Run(tmp_path / "first.sqlite")
    await run_steps(first, range(3))
    await first.manager.snapshot()
    await first.manager.save(tmp_path)
    assert [letter.prompt_id for letter in first.pool.dead_letters] == ["p3"]
    second = Run(tmp_path / "second.sqlite")
    second.source.restore = lambda state: ["prompt_data: rows was 10 and is 11"]  # type: ignore[method-assign]
    resumption = Resumption(step=3, version=first.engines.version, readmissions={"request": ["p3"]})
    with capture_logs() as logs:
        await second.manager.load(tmp_path, resumption)
    state = second.pool.snapshot().state
    assert state.book.quarantined == ()
    assert not [attempt for attempt in state.book.retries if "readmitted" in attempt.history]
    assert [each["no_longer_quarantined"] for each in logs] == [["p3"]]
    await second.ledger.close()
    with open_ledger(tmp_path / "second.sqlite") as reader:
        assert reader.dead_letters() == ()


async def test_the_end_of_a_failed_run_is_on_disk_too(tmp_path: Path) -> None:
    run = Run(tmp_path / "ledger.sqlite")

    async def die() -> None:
        await asyncio.sleep(0.02)
        raise TransientEngineError("the last engine is gone")

    run.engines.supervise = die  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as scope:
        running = scope.create_task(_raises(run.manager.run(), TransientEngineError))
        await run.publish(0)
        await running
    with open_ledger(tmp_path / "ledger.sqlite") as reader:
        assert reader.balance() == run.pool.balance()
        assert reader.balance().ended[Outcome.CANCELLED] > 0


async def test_stopping_ends_attempts_in_flight_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> Generation:
        await asyncio.Event().wait()
        raise AssertionError

    run = Run(tmp_path / "ledger.sqlite")
    monkeypatch.setattr(run.engines, "generate", never)
    async with asyncio.TaskGroup() as scope:
        scope.create_task(run.manager.run())
        await run.publish(0)
        await until(lambda: bool(run.pool.live()))
        await run.manager.stop()  # as after Ctrl-C: nobody closed
        with open_ledger(tmp_path / "ledger.sqlite") as reader:
            balance = reader.balance()
    assert balance.issued == balance.ended[Outcome.CANCELLED] > 0


async def test_a_disk_error_ends_the_run_once_and_never_reaches_the_dispatcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "ledger.sqlite")

    def full(events: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(run.ledger._store, "write", full)
    async with asyncio.TaskGroup() as scope:
        running = scope.create_task(_raises(run.manager.run(), LedgerError))
        await run.publish(0)
        error = await running
    assert "disk is full" in str(error)
    assert "--run-dir" in str(error)
    run.ledger.note(Issued(make_attempt(10**6)))  # what comes later is not kept, and raises nothing
    assert not run.ledger._waiting


async def test_after_its_end_a_flush_writes_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    # covers: C10
    writer = LedgerWriter(tmp_path / "ledger.sqlite")
    await writer.close()
    writer._waiting.append(Issued(make_attempt(1)))  # as if it had come too late
    async with asyncio.timeout(5):
        await writer.flush()
    assert len(writer._waiting) == 1


async def test_threads_that_hang_in_users_code_keep_nothing_from_the_disk(tmp_path: Path) -> None:
    """A hook's client without a timeout, through ``asyncio.to_thread``: it costs its attempts, not the run."""
    released = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    hanging = [asyncio.ensure_future(asyncio.to_thread(released.wait)) for _ in range(5)]
    writer = LedgerWriter(tmp_path / "ledger.sqlite")
    writer.note(Issued(make_attempt(1)))
    try:
        async with asyncio.timeout(20):
            await writer.flush()
            await writer.close()
        assert not writer._waiting
    finally:
        released.set()
        await asyncio.gather(*hanging)


async def test_a_disk_that_hangs_is_an_error_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C10
    monkeypatch.setattr(queued_writer, "WRITE_TIMEOUT", 0.05)
    writer = LedgerWriter(tmp_path / "ledger.sqlite", flush_seconds=0.001)
    writer._writing.acquire()
    error = await _raises(writer.run(), LedgerError)
    assert "took longer than" in str(error)
    await writer.close()
    writer._writing.release()


async def test_a_pool_that_contradicts_the_disk_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "ledger.sqlite")
    run.pool._ledger.issue(make_attempt(-0))  # behind the observer's back
    with pytest.raises(ContractViolation, match="the ledger on disk has"):
        await run.ledger.settle(run.pool.balance())
    await run.ledger.close()


async def test_a_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="--run-dir"):
        LedgerWriter(tmp_path / "missing" / "ledger.sqlite")


async def _raises(work: Awaitable[object], error: type[Exception]) -> Exception:
    with pytest.raises(error) as caught:
        await work
    return caught.value
