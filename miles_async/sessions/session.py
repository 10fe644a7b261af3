"""One session: the trajectory of an agent, and the outcome of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

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


@dataclass(eq=False, slots=True)
class Outcome:
    """How a request ended, or that it is under way."""

    messages: Sequence[object]
    opening: int | None  # see ``_opening``
    alone: bool = False  # no other request was under way when it ended
    cut: bool = False  # by the limit of length
    failure: str | None = None  # that is not the agent's own
    waiting: bool = True  # for an answer, also if the client gave up

    def is_settled_by(self, later: Outcome, *, continues: bool) -> bool:
        """Return whether the agent of this request has dealt with it by making a later one.

        ``continues``: the later one belongs to a conversation that was there before.
        """
        if len(self.messages) > 0 and later.messages[: len(self.messages)] == self.messages:
            return True
        is_of_another = continues and later.opening != self.opening
        return self.alone and not (self.failure is not None and is_of_another)


class Session:
    """One trajectory that an agent makes."""

    def __init__(self, session_id: str, taker: TurnTaker, *, may_constrain: bool) -> None:
        self.session_id = session_id
        self.taker = taker
        self._may_constrain = may_constrain
        self.ending: SessionEnding = "open"
        self.reason = ""
        self.reward: float | RewardParts | None = None
        self.last_used = now()
        self.history = History()
        self._tasks: set[asyncio.Task[object]] = set()
        self._outcomes: list[Outcome] = []
        self._openings: set[int] = set()

    @contextmanager
    def request(self, messages: Sequence[object] = ()) -> Iterator[Outcome]:
        """Context of a completion request: notes its outcome.

        An agent that continues after a failure has dealt with it: with the conversation that failed, or a new one if no
        other request was under way.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        outcome = Outcome(messages, _opening(messages))
        continues = outcome.opening in self._openings
        self._outcomes = [each for each in self._outcomes if not each.is_settled_by(outcome, continues=continues)]
        self._outcomes.append(outcome)
        if outcome.opening is not None:
            self._openings.add(outcome.opening)
        try:
            yield outcome
            outcome.waiting = False
        except MilesAsyncError as error:
            outcome.waiting = False
            outcome.cut = isinstance(error, NoRoomError)
            if not isinstance(error, RequestRejectedError):  # which is the agent's own fault
                outcome.failure = str(error)
            raise
        finally:
            self._tasks.discard(task)
            outcome.alone = not self._tasks
            if not (outcome.cut or outcome.failure or outcome.waiting) and outcome in self._outcomes:
                self._outcomes.remove(outcome)
            self.last_used = now()

    @property
    def cut(self) -> bool:
        """Whether the limit of length ended a conversation."""
        return any(each.cut for each in self._outcomes)

    @property
    def failure(self) -> str | None:
        """Why a request failed that is not the agent's own fault."""
        return next((each.failure for each in self._outcomes if each.failure is not None), None)

    @property
    def waiting(self) -> bool:
        """Whether a request had no answer, or its client gave up before there was one."""
        return any(each.waiting for each in self._outcomes)

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


def _opening(messages: Sequence[object]) -> int | None:
    """Fingerprint of what stands before the first answer, by which agents of a session are told apart; None if there
    are no messages.
    """
    said = takewhile(lambda each: not (isinstance(each, Mapping) and each.get("role") == "assistant"), messages)
    return hash(str([*said])) if messages else None
