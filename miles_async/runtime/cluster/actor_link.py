"""The caller's half of calls that may be repeated, so that a lost link to a living actor costs only time.

Ray distinguishes a dead actor (ActorDiedError) from one that cannot be reached (ActorUnavailableError). Calls to the
second are repeated until it answers or has been silent for a stated time; ``call_once.py`` in the actor executes each
once.

A reply that is lost with its connection may go unnoticed for minutes, since the caller has nothing to send. So an
actor that takes long to answer is pinged, and pinged again: a ping meets the broken connection, and Ray reports it for
all. One ping is not enough: it may have arrived, and its reply be lost with the reply to the call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from miles_async.errors import ProcessLostError
from miles_async.runtime.clock import now
from miles_async.runtime.cluster.call_once import CallId

log = structlog.get_logger(__name__)

PATIENCE_SECONDS = 120.0  # Ray itself gives up a node that does not answer it for about a minute
RETRY_SECONDS = 1.0
PING_SECONDS = 5.0
# Ray explains at length; the text before these names the process and how it ended, or how full the memory was.
_EXPLANATIONS = ("Some common causes", "Ray killed this worker", "Refer to the documentation")


class ActorLink:
    """One caller's calls to one actor."""

    def __init__(
        self, name: str, ping: Callable[[], Awaitable[object]] | None = None, *, patience: float = PATIENCE_SECONDS
    ) -> None:
        """``name``: of the actor, for messages. ``ping``: a call that the actor answers at once, whatever it does; None
        where something else notices an unreachable actor.

        ``patience``: seconds that the actor may be out of reach before it counts as lost.
        """
        self._name = name
        self._ping = ping
        self._patience = patience
        self._numbers = itertools.count(1)
        self._open: set[int] = set()
        self._silent_since: float | None = None

    async def call[Result](self, make: Callable[[CallId], Awaitable[Result]]) -> Result:
        """Await ``make(identity)``, again as long as the actor cannot be reached. ``make`` must pass the identity on.

        Raises ProcessLostError if the actor was out of reach for ``patience`` seconds, and what the call raises.
        """
        from ray.exceptions import ActorUnavailableError, RayTaskError  # here: tools and tests use engines without Ray

        number = next(self._numbers)
        self._open.add(number)
        try:
            while True:
                try:
                    answer = await self._pinged(make(CallId(number, frozenset(self._open))))
                except ActorUnavailableError as error:
                    self._note_silence(why_gone(error))
                    await asyncio.sleep(RETRY_SECONDS)
                except RayTaskError:  # the answer is an error
                    self._note_answer()
                    raise
                else:
                    self._note_answer()
                    return answer
        finally:
            self._open.discard(number)

    async def _pinged[Result](self, call: Awaitable[Result]) -> Result:
        """Await the call, pinging the actor meanwhile."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([answer], timeout=PING_SECONDS))[0]:
                if self._ping is not None:
                    await self._ping_until(answer, self._ping)
            return answer.result()
        finally:
            answer.cancel()

    async def _ping_until[Result](self, answer: asyncio.Future[Result], ping: Callable[[], Awaitable[object]]) -> None:
        """Ping until a ping or the call is answered. A ping may be lost like the call, so it is repeated."""
        from ray.exceptions import ActorUnavailableError, RayError

        pongs: list[asyncio.Future[object]] = []
        until = now() + self._patience - self._silent_seconds()
        try:
            while not (found := [pong for pong in pongs if pong.done()]):
                if (left := until - now()) <= 0:
                    raise self._lost("it answers no ping")
                pongs.append(asyncio.ensure_future(ping()))
                either: list[asyncio.Future[Any]] = [answer, *pongs]
                await asyncio.wait(either, timeout=min(left, PING_SECONDS), return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return
            found[0].result()
        except ActorUnavailableError as error:
            self._note_silence(why_gone(error))
        except RayError:  # it died: the call has the same error in a moment
            pass
        else:
            self._note_answer()
        finally:
            for pong in pongs:
                pong.cancel()

    def _silent_seconds(self) -> float:
        return 0.0 if self._silent_since is None else now() - self._silent_since

    def _note_silence(self, reason: str) -> None:
        if self._silent_since is None:
            self._silent_since = now()
            log.warning("out of reach", process=self._name, patience_seconds=self._patience, reason=reason)
        elif self._silent_seconds() >= self._patience:
            raise self._lost(reason)

    def _note_answer(self) -> None:
        if self._silent_since is not None:
            log.info("in reach again", process=self._name, seconds=round(self._silent_seconds(), 1))
            self._silent_since = None

    def _lost(self, reason: str) -> ProcessLostError:
        return ProcessLostError(f"{self._name} was out of reach for {self._patience:g} s: {reason}")


def why_gone(error: Exception) -> str:
    """Say how the called process ended. ``error`` is Ray's own, not one that the call raised."""
    from ray.exceptions import OutOfMemoryError  # here, since tools and tests use engines without Ray

    text = str(error)
    for explanation in _EXPLANATIONS:
        text = text.split(explanation)[0]
    found = " ".join(text.split())
    if isinstance(error, OutOfMemoryError):
        return (
            f"Ray killed it since the machine ran out of memory (fewer --rollout-num-gpus or --actor-num-gpus-per-node "
            f"on it, or a machine with more): {found}"
        )
    return found
