"""An actor's half of calls that may be repeated: each call is executed once, and every repetition gets its answer.

A caller that lost its link to an actor cannot know whether its call arrived. With the other half (``actor_link.py``)
it makes the call again under the same identity: an actor that has executed it repeats its answer, one that is executing
it answers both when it is done, and one that never received it executes it now.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from miles_async.errors import StaleCallError


@dataclass(frozen=True, slots=True)
class CallId:
    """Identity of a call from one caller to one actor. A repetition has the same number."""

    number: int  # of the caller's calls to this actor, from 1
    open: frozenset[int]  # calls that the caller still wants answered, this one included


class CallOnce:
    """Executes each call of one caller once, even if calls or answers are lost, repeated or overtaken. An answer is
    kept until a later call says that the caller no longer wants it; a call that arrives after that is an error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = CallId(0, frozenset())
        self._answers: dict[int, Future[Any]] = {}

    def run[Result](self, call: CallId, work: Callable[[], Result]) -> Result:
        """Return what ``work()`` returns or raises, executed now or under the same identity before.

        Raises StaleCallError if the caller has given the call up.
        """
        answer, is_first = self._answer(call)
        if is_first:
            try:
                answer.set_result(work())
            except BaseException as error:  # supervision point: it is raised to every caller
                answer.set_exception(error)
        return answer.result()

    async def run_async[Result](self, call: CallId, work: Callable[[], Awaitable[Result]]) -> Result:
        """:meth:`run` for a coroutine."""
        answer, is_first = self._answer(call)
        if is_first:
            try:
                answer.set_result(await work())
            except BaseException as error:  # supervision point: it is raised to every caller
                answer.set_exception(error)
        return await asyncio.wrap_future(answer)

    def _answer(self, call: CallId) -> tuple[Future[Any], bool]:
        """The call's answer, which may be yet to come, and whether the call is new."""
        with self._lock:
            if call.number > self._newest.number:
                self._newest = call
                self._answers = {number: kept for number, kept in self._answers.items() if number in call.open}
            if call.number not in self._newest.open:
                raise StaleCallError(
                    f"call {call.number} arrived after call {self._newest.number}, which gave it up: it is not executed"
                )
            known = self._answers.get(call.number)
            answer = self._answers[call.number] = known or Future()
            return answer, known is None
