"""One session: the trajectory of an agent, and the outcome of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from miles_async.errors import MilesAsyncError, NoRoomError, RequestRejectedError, TrajectoryError
from miles_async.runtime.clock import now
from miles_async.sessions.protocols.exchange import History
from miles_async.trajectory.rendering import check_options
from miles_async.trajectory.schema_bounds import check_bounds
from miles_async.trajectory.taker import Limits, TurnRequest, TurnTaker
from miles_async.types import JsonObject, RewardParts, SessionEnding


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a session, rollout process → session server."""

    routing_key: str
    sampling: JsonObject  # SGLang's parameters
    limits: Limits
    may_constrain: bool = True  # answers may be made to fit a grammar: the loss corrects for it, or there is none


class Session:
    """One trajectory that an agent makes."""

    def __init__(self, session_id: str, taker: TurnTaker, *, may_constrain: bool) -> None:
        self.session_id = session_id
        self.taker = taker
        self._may_constrain = may_constrain
        self.ending: SessionEnding = "open"
        self.reason = ""
        self.reward: float | RewardParts | None = None
        self.requests = 0
        self.cut = False
        self.failure: str | None = None
        self.waiting = False
        self.last_used = now()
        self.history: History = {}
        self._tasks: set[asyncio.Task[object]] = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context of a completion request: counts it and notes its outcome."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.requests += 1
        self.cut, self.failure, self.waiting = False, None, True
        try:
            yield
            self.waiting = False
        except MilesAsyncError as error:
            self.waiting = False
            self.cut = isinstance(error, NoRoomError)
            if not isinstance(error, RequestRejectedError):  # which is the agent's own fault
                self.failure = str(error)
            raise
        finally:
            self._tasks.discard(task)
            self.last_used = now()

    def idle_seconds(self) -> float:
        """Seconds since the last use; 0 while a request is under way."""
        return 0.0 if self._tasks else now() - self.last_used

    def end(self, ending: SessionEnding, reason: str = "") -> None:
        """End the session: no more turns; requests under way end without being kept."""
        if self.ending == "open":
            self.ending, self.reason = ending, reason
        for task in self._tasks:
            task.cancel()

    def count(self, request: TurnRequest) -> int:
        """Count the tokens of a conversation as it would be sent to an engine. Raises TrajectoryError."""
        check_options(request.options, self.taker.trajectory.renderer.chat.variables)
        return self.taker.trajectory.count(request.messages, request.tools, request.options)

    def check(self, request: TurnRequest) -> None:
        """Check a request's options of the template and constraints of the engine.

        Raises TrajectoryError if it sets an option of the template that may not be set, or a constraint that the run's
        loss does not correct for or that could take an engine's time.
        """
        check_options(request.options, self.taker.trajectory.renderer.chat.variables)
        if request.constraint is None:
            return
        if not self._may_constrain:
            raise TrajectoryError(
                "response_format and tool_choice other than auto and none change what is sampled from, and this run "
                "does not correct for that: add --use-rollout-logprobs or --use-tis"
            )
        check_bounds(request.constraint.schemas)
