"""User code may raise anything, cancel itself or hang: only an Exception or our own cancellation comes out.

# covers: C6, C10
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog
import uvloop

from miles_async.errors import OverdueError, UserCodeError
from miles_async.runtime import user_code
from miles_async.runtime.user_code import call_user_code, contain_user_code, expect, raised, run_user_code, unchanged
from miles_async.types import Prompt


async def returns() -> int:
    return 7


async def raises(error: BaseException) -> int:
    await asyncio.sleep(0)
    raise error


async def cancels_itself() -> int:
    task = asyncio.current_task()
    task.cancel()
    await asyncio.sleep(60)
    return 7


async def awaits_what_was_cancelled() -> int:
    closed = asyncio.get_running_loop().create_future()
    closed.cancel()  # as the requests of a shared client that somebody closes
    await closed
    return 7


async def test_a_result_and_an_exception_come_out_as_they_are() -> None:
    assert await run_user_code(returns(), seconds=5.0) == 7
    with pytest.raises(KeyError, match="answer"):
        await run_user_code(raises(KeyError("answer")))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_other_base_exceptions_become_exceptions(error: BaseException) -> None:
    with pytest.raises(UserCodeError, match=type(error).__name__):
        await run_user_code(raises(error))

    def function() -> None:
        raise error

    with pytest.raises(UserCodeError, match=type(error).__name__):
        call_user_code(function)


@pytest.mark.parametrize("work", [cancels_itself, awaits_what_was_cancelled])
async def test_a_cancellation_that_is_not_ours_does_not_reach_our_task_group(work: Awaitable[None]) -> None:
    ended = []

    async def one(work: Awaitable[None]) -> None:
        try:
            ended.append(await run_user_code(work()))
        except UserCodeError as error:
            ended.append(error)

    async with asyncio.TaskGroup() as scope:
        scope.create_task(one(work))
        scope.create_task(one(returns))
    assert sorted(map(type, ended), key=str) == [int, UserCodeError]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_tasks_that_it_starts_itself_do_not_end_the_event_loop(error: BaseException) -> None:
    async def together() -> None:
        await asyncio.gather(raises(error), returns())

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as scope:
            scope.create_task(raises(error), name="mine")

    async def forgotten() -> int:
        task = asyncio.ensure_future(raises(error))
        await asyncio.wait([task])
        return 7

    with pytest.raises(UserCodeError, match=f"{type(error).__name__}.* in a task"):
        await run_user_code(together())
    with pytest.raises(ExceptionGroup):
        await run_user_code(in_a_group())
    assert await run_user_code(forgotten()) == 7


async def test_it_cannot_cancel_tasks_that_others_started() -> None:
    contain_user_code(asyncio.get_running_loop())
    started, over = asyncio.Event(), asyncio.Event()

    async def ours() -> int:
        started.set()
        await over.wait()
        return 7

    async def cancels_all() -> None:
        for task in asyncio.all_tasks():
            if task.get_name() == "ours":
                task.cancel()

    def cancels_in_a_function() -> None:
        task.cancel()

    async def cancels_its_own() -> int:
        task = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(50):
            return await run_user_code(returns())

    task = asyncio.create_task(ours(), name="ours")
    await started.wait()
    with pytest.raises(UserCodeError, match=r"cancels a task that it did not start: .*ours"):
        await run_user_code(cancels_all())
    with pytest.raises(UserCodeError, match="cancels a task that it did not start"):
        call_user_code(cancels_in_a_function)
    assert await run_user_code(cancels_its_own()) == 7
    over.set()
    assert await task == 7
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()  # by us
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_cannot_stop_the_event_loop(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def stops() -> None:
        asyncio.get_running_loop().stop()

    async def run() -> int:
        with pytest.raises(UserCodeError, match="stops the event loop, which is not its own"):
            await run_user_code(stops())
        return await run_user_code(returns())

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(run()) == 7  # it stops the loop itself


async def test_our_cancellation_ends_it_and_stays_one() -> None:
    cleaned_up = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned_up.append(True)

    task = asyncio.ensure_future(run_user_code(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned_up == [True]


async def test_a_deadline_holds_for_code_that_swallows_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "END_SECONDS", 0.02)
    over = asyncio.Event()

    async def stubborn() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    async with asyncio.timeout(50):
        with pytest.raises(OverdueError, match="longer than --reward-timeout"):
            await run_user_code(stubborn(), seconds=0.02, overdue="longer than --reward-timeout")
        task = asyncio.ensure_future(run_user_code(stubborn()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    over.set()
    await asyncio.sleep(0.01)
    assert not user_code._left_behind


async def test_code_that_is_cancelled_twice_while_it_cleans_up_is_held_until_it_ends() -> None:
    over = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await over.wait()

    task = asyncio.ensure_future(run_user_code(slow_to_end()))
    await asyncio.sleep(0.01)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    assert task.cancelled()
    assert len(user_code._left_behind) == 1  # the event loop itself would let it be collected
    over.set()
    await asyncio.sleep(0.01)
    assert not user_code._left_behind


def test_a_wrong_value_is_shown_shortened_and_a_right_one_returned():
    assert expect("kept", str, "a text") == "kept"
    with pytest.raises(UserCodeError) as caught:
        expect([*range(1000)], str, "a text")
    assert raised(caught.value) == "returned [0, 1, 2, 3, 4, 5, ...], expected a text"


def test_an_error_is_described_with_its_line_and_logged_with_its_traceback_once(tmp_path: Path) -> None:
    hook = tmp_path / "my_hook.py"
    hook.write_text("import json, sys\ndef parse(text):\n    json.loads(text)\ndef leave(text):\n    sys.exit(text)\n")
    names: dict[str, Callable[[str], None]] = {}
    exec(compile(hook.read_text(), hook, "exec"), names)  # what importing it does
    with structlog.testing.capture_logs() as logged:
        for text in ("{", "["):
            with pytest.raises(ValueError, match="Expecting") as caught:
                call_user_code(names["parse"], text)
            assert raised(caught.value).endswith(f" at {hook}:3")  # not of the library that it calls
        with pytest.raises(UserCodeError) as left:
            call_user_code(names["leave"], "bye")
        assert raised(left.value) == f"raised SystemExit('bye') at {hook}:5"
    assert [line["traceback"].splitlines()[0] for line in logged] == ["Traceback (most recent call last):"] * 2
    assert f"{hook}:3" in logged[0]["event"]


def test_metadata_are_held_once_for_all_samples_that_have_them() -> None:
    """Tests of programs take megabytes, and thousands of samples are generated or rewarded at a time."""
    prompts = [Prompt(prompt_id="p", token_ids=(1,), text="", metadata={"tests": ["1\n" * 500_000]}) for _ in range(2)]
    tracemalloc.start()
    try:
        with ExitStack() as running:
            for prompt in prompts * 20:
                running.enter_context(unchanged(prompt, ()))
            held, _ = tracemalloc.get_traced_memory()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 500_000 < held < 3_000_000
