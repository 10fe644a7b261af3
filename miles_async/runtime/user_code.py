"""The boundary behind which users' code runs: rewards, environments, agents, Generates, filters.

Such code may raise anything, cancel its own task, or never end. Only its result, an Exception, or our cancellation
leaves this boundary: nothing else may reach a task group or the event loop.
"""

from __future__ import annotations

import asyncio
import reprlib
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import partial
from typing import cast
from weakref import WeakValueDictionary

import structlog
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from miles_async.errors import OverdueError, UserCodeError
from miles_async.runtime.nesting import DEEPEST, too_deep
from miles_async.runtime.own_place import own_place
from miles_async.runtime.serialization import UNSAVABLE, decode, encode
from miles_async.runtime.texts import shortened
from miles_async.types import JsonObject, Prompt, Sample

log = structlog.get_logger(__name__)

TRAINED_ON = ("tokens", "loss_mask", "rollout_logprobs", "weight_versions")
"""Arrays of a sample that user code may read and not change; one of experts is too large to compare."""

END_SECONDS = 5.0  # that a cancelled coroutine may take to clean up

_in_user_code = ContextVar("_in_user_code", default=False)  # inherited by tasks that the code starts
_logged: set[str] = set()  # places of user code whose traceback the log has
_held: WeakValueDictionary[bytes, _Saved] = WeakValueDictionary()  # digest → metadata from before code that runs now
_left_behind: set[asyncio.Task[object]] = set()  # the event loop itself only holds weak references


async def run_user_code[T](work: Coroutine[object, None, T], *, seconds: float | None = None, overdue: str = "") -> T:
    """Await a user's coroutine in a separate task, so that only the caller's cancellation is a cancellation.

    Raises:
        Exception: whatever it raises.
        UserCodeError: it raised another BaseException (CancelledError, SystemExit, KeyboardInterrupt).
        OverdueError: it took longer than ``seconds``; the message is ``overdue``.
    """
    loop = asyncio.get_running_loop()
    contain_user_code(loop)
    # No TaskGroup: it would wait forever for code that swallows its cancellation.
    task = asyncio.Task(_outcome(work), loop=loop)
    try:
        in_time = await _done(task, seconds)
    finally:
        if not task.done():
            await _end(task)
    if not in_time:
        raise OverdueError(overdue)
    result, error = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
    if error is None:
        return result  # type: ignore[return-value]
    if isinstance(error, Exception):
        raise error
    raise UserCodeError(f"raised {shortened(repr(error))}") from error


def call_user_code[**P, T](function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a user's function. Raises its Exceptions, and UserCodeError for any other BaseException."""
    inside = _in_user_code.set(True)
    try:
        return function(*arguments, **named)
    except Exception:
        raise
    except BaseException as error:  # supervision point: SystemExit would end the process, CancelledError its task
        raise UserCodeError(f"raised {shortened(repr(error))}") from error
    finally:
        _in_user_code.reset(inside)


def expect[T](found: object, kind: type[T], expected: str) -> T:
    """Return user code's result. Raises UserCodeError unless it is a ``kind``, described by ``expected``."""
    if not isinstance(found, kind):
        raise wrong_value(found, expected)
    return found


def wrong_value(found: object, expected: str) -> UserCodeError:
    """Return the error of user code that returned ``found``, which is shown shortened."""
    return UserCodeError(f"returned {reprlib.repr(found)}, expected {expected}")


@contextmanager
def unchanged(prompt: Prompt, samples: Sequence[Sample]) -> Iterator[None]:
    """Check that code in the context changes no array of the prompt's samples and leaves metadata that can be saved.
    Read-only arrays are not enough: a tensor of ``torch.from_numpy`` is written to all the same.

    Raises UserCodeError naming the array, or the record and the key. After any error, a prompt whose metadata cannot be
    saved has those from before.
    """
    before, saved = _digests(samples), _saved(prompt.metadata)
    try:
        yield
        for sample in samples:
            check_metadata(sample, "left")
    except BaseException:
        with suppress(UserCodeError):
            _check_or_restore(prompt, saved)
        raise
    _check_or_restore(prompt, saved)
    for (name, found), (_, expected) in zip(_digests(samples), before, strict=True):
        if found != expected:
            raise UserCodeError(f"changed {name} of a sample in place, which is trained on: change a copy")


class _Saved:
    """Encoded metadata, which cost a fraction of a deep copy."""

    __slots__ = ("__weakref__", "content")

    def __init__(self, content: bytes) -> None:
        self.content = content


def _saved(metadata: JsonObject) -> _Saved:
    """Save metadata, once for all samples that have the same: tests of programs take megabytes. Keys that cannot be
    encoded are left out: another sample of the prompt may be with its reward.
    """
    try:
        content = encode(metadata)
    except UNSAVABLE:
        content = encode({key: value for key, value in metadata.items() if not _unsavable(value)})
    return _held.setdefault(xxh3_128_digest(content), _Saved(content))


def _check_or_restore(prompt: Prompt, saved: _Saved) -> None:
    """Check the prompt's metadata unless they are as ``saved``, which they become again on an error."""
    with suppress(*UNSAVABLE):
        if encode(prompt.metadata) == saved.content:
            return
    try:
        check_metadata(prompt, "left")
    except UserCodeError:
        if isinstance(prompt.metadata, dict):
            prompt.metadata.clear()
            prompt.metadata.update(decode(saved.content, dict))
        raise


def check_metadata(record: Sample | Prompt, how: str) -> None:
    """Raise UserCodeError unless the metadata of what user code ``returned`` or ``left`` can be saved."""
    what = f"{how} a {type(record).__name__} whose metadata"
    if too_deep(record.metadata):
        raise UserCodeError(f"{what} has more than {DEEPEST} nested levels")
    try:
        encode(record.metadata)
    except UNSAVABLE as error:
        place = "".join(f"[{shortened(repr(key), 60)}]" for key in _first_unsavable(record.metadata))
        raise UserCodeError(f"{what} cannot be saved: {place}{': ' * bool(place)}{error}") from error


def _first_unsavable(value: object) -> tuple[object, ...]:
    """Return the keys and indices that lead to the first innermost value that cannot be saved."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return next(((key, *_first_unsavable(each)) for key, each in inner if _unsavable(each)), ())


def _unsavable(value: object) -> bool:
    try:
        encode(value)
    except UNSAVABLE:
        return True
    return False


def _digests(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    branches = [branch for sample in samples for branch in sample.branches]
    return [(name, xxh3_64_intdigest(getattr(branch, name))) for branch in branches for name in TRAINED_ON]


def raised(error: Exception) -> str:
    """Describe what user code raised and where, or wrongly returned, shortened, for the end of a sentence.

    The first error of each line of user code is logged with its traceback.
    """
    source = error.__cause__ if isinstance(error, UserCodeError) else error  # None of a wrong value
    place = "" if source is None else own_place(source)
    if place and place not in _logged:
        _logged.add(place)
        text = shortened("".join(traceback.format_exception(source)))
        log.warning(f"user code raised an error{place}; its line is not logged again", traceback=text)
    return shortened(str(error) if isinstance(error, UserCodeError) else f"raised {error!r}") + place


async def _done(task: asyncio.Task[object], seconds: float | None) -> bool:
    """Wait for a task for at most ``seconds``; return whether it is done.

    As ``asyncio.wait``, at half its price: every sample waits here twice, for its Generate and for its reward.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
    timer = None if seconds is None else loop.call_later(seconds, wake)
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return task.done()


async def _outcome[T](work: Coroutine[object, None, T]) -> tuple[T | None, BaseException | None]:
    _in_user_code.set(True)
    try:
        return await work, None
    except BaseException as error:  # supervision point: asyncio lets SystemExit of a task end the event loop
        return None, error


def contain_user_code(loop: asyncio.AbstractEventLoop) -> None:
    """Keep user code from ending the event loop, itself or by SystemExit of a task that it starts
    (``asyncio.gather``), and from cancelling tasks that are created from now on by others (``asyncio.all_tasks``).
    """
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
        loop.stop = partial(_stop, loop.stop)  # type: ignore[method-assign]


def _stop(stop: Callable[[], None]) -> None:
    if _in_user_code.get():
        raise UserCodeError("stops the event loop, which is not its own")
    stop()


class _OurTask[T](asyncio.Task[T]):
    """A task that user code did not start."""

    def cancel(self, msg: object = None) -> bool:
        """Raises UserCodeError in user code."""
        if _in_user_code.get():
            raise UserCodeError(f"cancels a task that it did not start: {shortened(repr(self), 400)}")
        return super().cancel(msg)


def _make_task[T](
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[object, None, T] | Generator[asyncio.Future[object] | None, None, T],
    *,
    context: Context | None = None,
) -> asyncio.Task[T]:
    coroutine = cast("Coroutine[object, None, T]", work)  # a task refuses generators since Python 3.12
    if not _in_user_code.get():
        return _OurTask(coroutine, loop=loop, context=context)
    if asyncio.iscoroutine(work):
        coroutine = _without_exits(coroutine)
    return asyncio.Task(coroutine, loop=loop, context=context)


async def _without_exits[T](work: Coroutine[object, None, T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserCodeError(f"raised {shortened(repr(error))} in a task") from error


async def _end(task: asyncio.Task[object]) -> None:
    _left_behind.add(task)  # before waiting, which a second cancellation ends
    task.add_done_callback(_left_behind.discard)
    task.cancel()
    await asyncio.wait([task], timeout=END_SECONDS)
    if not task.done():
        log.warning("user code continues although it was cancelled", waited_seconds=END_SECONDS, task=repr(task))
