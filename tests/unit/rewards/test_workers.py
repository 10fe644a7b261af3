"""A reward that hangs or dies costs one call: the worker pool."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from miles_async.errors import RewardError, ServiceUnavailableError
from miles_async.rewards import workers as workers_module
from miles_async.rewards.workers import WorkerPool
from tests.fakes.worker_functions import die, double, explode, fail, fail_at_length, hang, hang_in_c, pid, shout, sleep
from tests.unit.runtime.processes.waiting import children_with

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def pool(size: int = 1, timeout: float = 20.0) -> AsyncIterator[WorkerPool]:
    made = WorkerPool(size, timeout)
    try:
        yield made
    finally:
        await made.close()


def workers_of(parent: int) -> list[psutil.Process]:
    return children_with("miles_async.rewards.worker", parent)


async def test_results_come_back_and_the_worker_is_used_again():
    async with pool() as workers:
        assert await workers.call(double, 21) == 42
        assert (worker := await workers.call(pid)) == await workers.call(pid) != os.getpid()
        assert os.getsid(worker) != os.getsid(0)  # Ctrl-C in the terminal doesn't reach it before us


async def test_workers_have_no_variable_named_like_a_secret(monkeypatch: pytest.MonkeyPatch):
    # covers: C13
    for name in ("MY_API_KEY", "hf_token", "DB_PASSWORD", "MY_SETTING"):
        monkeypatch.setenv(name, "told")
    async with pool() as workers:
        found = [
            await workers.call(os.getenv, name) for name in ("MY_API_KEY", "hf_token", "DB_PASSWORD", "MY_SETTING")
        ]
    assert found == [None, None, None, "told"]


@pytest.mark.parametrize("endless", [hang, hang_in_c])
async def test_a_hang_is_killed_and_the_next_call_is_fine(endless: Callable[[], object]):
    async with pool(timeout=1.0) as workers:
        first = psutil.Process(await workers.call(pid))
        with pytest.raises(RewardError, match=r"took longer than --reward-timeout 1 s") as caught:
            await workers.call(endless)
        assert not isinstance(caught.value, ServiceUnavailableError)  # the answer's own doing: it would hang again
        assert await workers.call(double, 4) == 8
        assert not psutil.wait_procs([first], timeout=20)[1]


async def test_a_worker_that_dies_costs_its_call_and_is_not_the_samples_fault():
    # covers: C6
    async with pool() as workers:
        with pytest.raises(ServiceUnavailableError, match=r"died \(exit status -9\)"):
            await workers.call(die)
        assert await workers.call(double, 4) == 8


async def test_a_worker_that_does_not_start_is_not_the_samples_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_module, "_START_SECONDS", 0.001)
    async with pool() as workers:
        with pytest.raises(ServiceUnavailableError, match=r"longer than 0\.001 s to start"):
            await workers.call(double, 4)


async def test_a_worker_that_dies_idle_costs_nothing():
    async with pool() as workers:
        os.kill(await workers.call(pid), signal.SIGKILL)
        [worker] = workers._idle
        await worker.wait()
        assert await workers.call(double, 4) == 8


async def test_a_function_that_raises_prints_or_allocates_harms_no_other():
    async with pool() as workers:
        with pytest.raises(RewardError, match="ZeroDivisionError: by nothing"):
            await workers.call(fail)
        with pytest.raises(RewardError, match="characters left out") as caught:
            await workers.call(fail_at_length)
        assert len(str(caught.value)) < 5000
        with pytest.raises(RewardError, match="Cannot allocate memory"):
            await workers.call(explode)
        assert await workers.call(shout) == "done"
        assert await workers.call(double, 4) == 8


async def test_calls_beyond_the_size_wait_without_their_time_running():
    async with pool(size=2, timeout=2.0) as workers:
        pids = await asyncio.gather(*(workers.call(sleep, 0.6) for _ in range(8)))
        assert len(set(pids)) == 2


async def test_a_caller_that_gives_up_leaves_no_late_answer_to_the_next():
    async with pool() as workers:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await workers.call(sleep, 30)
        assert await workers.call(double, 4) == 8


async def test_nothing_starts_before_the_first_call_and_nothing_is_left_after_close():
    async with pool(size=4) as workers:
        assert not workers_of(os.getpid())
        call = asyncio.create_task(workers.call(sleep, 30))
        await workers.call(pid)
        assert len(workers_of(os.getpid())) == 2
        await workers.close()
        with pytest.raises(ServiceUnavailableError, match="died"):
            await call
    assert not workers_of(os.getpid())


def test_workers_die_with_their_parent():
    program = """
import asyncio, os
from miles_async.rewards import workers as workers_module
from miles_async.rewards.workers import WorkerPool
from tests.fakes.worker_functions import hang, pid
async def main():
    workers = WorkerPool(2, 60)
    call = asyncio.create_task(workers.call(hang))
    print(await workers.call(pid), flush=True)
    await call
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        parent.stdout.readline()
        deadline = time.monotonic() + 20
        while len(children := workers_of(parent.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.communicate()
    assert len(children) == 2
    assert not psutil.wait_procs(children, timeout=20)[1]
