"""An event loop whose clock jumps to the next timer: hours of waiting take milliseconds, and every run is the same.

Why not looptime, which tests could use: deadlocks are found at once here (nothing ready, no timer, no outside: nothing
can ever happen), ``asyncio.to_thread`` runs inline instead of in a thread that takes real time, and tasks and timers
are numbered, so that the sets asyncio keeps tasks in have the same order in every process, and timers of the same
moment fire in creation order, whatever other timers there are.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from miles_async.errors import StalledError

_DIGITS = 9  # of a time in seconds: sums that differ in rounding only are the same moment


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``loop.time()`` starts at 0 and moves only while nothing is ready to run. No sockets, no threads.

    Raises StalledError out of ``run_forever`` when nothing can ever happen, or past ``limit_seconds``.
    """

    def __init__(self, limit_seconds: float = math.inf) -> None:
        self._jumping = _JumpingSelector(self._next_due, self._stalled, limit_seconds)
        super().__init__(self._jumping)
        numbers = itertools.count()
        self._timers = itertools.count()
        self.set_task_factory(lambda loop, coroutine, **options: _Task(next(numbers), coroutine, loop, **options))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a timer as asyncio does; timers due at the same time fire in creation order."""
        when = round(when, _DIGITS)
        timer = _Timer(next(self._timers), when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    @property
    def iterations(self) -> int:
        """Iterations of the loop so far; every await that really waits falls into one of them."""
        return self._jumping.iterations

    def at_iteration(self, iteration: int, call: Callable[[], object]) -> None:
        """Call ``call`` in that iteration, before anything that becomes ready in it."""
        self._jumping.calls[iteration] = lambda: self.call_soon(call)

    def run_in_executor[*Ts, T](self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call the function inline, with the result in the next iteration: threads take no virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # supervision point: the thread's error belongs to whoever awaits it
            self.call_soon(_settle, future, future.set_exception, error)
        else:
            self.call_soon(_settle, future, future.set_result, result)
        return future

    def _next_due(self) -> float:
        """Time of the next timer; asyncio has removed cancelled ones from the head of its heap."""
        return float(self._scheduled[0].when())  # type: ignore[attr-defined]

    def _stalled(self, why: str) -> StalledError:
        tasks = "; ".join(sorted(map(_where, asyncio.all_tasks(self)))[:20])
        return StalledError(f"{why} at {self.time():.6g} virtual seconds. Tasks that wait: {tasks or 'none'}")


def run_in_virtual_time[T](main: Coroutine[object, None, T], *, limit_seconds: float = math.inf) -> T:
    """``asyncio.run`` on a loop of virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(limit_seconds)) as runner:
        return runner.run(main)


def _settle[T, Outcome](future: asyncio.Future[T], settle: Callable[[Outcome], None], outcome: Outcome) -> None:
    if not future.cancelled():
        settle(outcome)


class _JumpingSelector(selectors.SelectSelector):
    """Selector that moves the clock instead of sleeping."""

    def __init__(
        self, next_due: Callable[[], float], stalled: Callable[[str], StalledError], limit_seconds: float
    ) -> None:
        super().__init__()
        self._next_due = next_due
        self.now = 0.0
        self.iterations = 0
        self.calls: dict[int, Callable[[], object]] = {}
        self._stalled = stalled
        self._limit_seconds = limit_seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.iterations += 1
        if (call := self.calls.pop(self.iterations, None)) is not None:
            call()
            return []
        if timeout is None:
            raise self._stalled("deadlock: nothing is ready and no timer runs")
        if timeout > 0:  # to the moment itself: a sum of differences depends on the timers in between
            self.now = max(self.now, self._next_due())
        if self.now > self._limit_seconds:
            limit, self._limit_seconds = self._limit_seconds, math.inf  # reported once; cleaning up takes time too
            raise self._stalled(f"not done within {limit:g} s")
        return []


class _Timer(asyncio.TimerHandle):
    """Timers due at the same time fire in creation order, which a heap alone would not ensure."""

    def __init__(self, number: int, when: float, *options: Any) -> None:
        super().__init__(when, *options)
        self._order = (when, number)

    def __lt__(self, other: object) -> bool:
        return self._order < other._order if isinstance(other, _Timer) else NotImplemented


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """Task that is hashed by its number instead of its address."""

    def __init__(self, number: int, coroutine: Any, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self._number = number  # first: it is asked for while the task registers itself
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _where(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return task.get_name()
    return f"{task.get_name()} at {frames[0].f_code.co_qualname}:{frames[0].f_lineno}"
