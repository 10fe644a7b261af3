"""States of all engines, and whether requests may be sent. The router mirrors them.

::

    starting ──► joining ──► serving
        ▲       (weights        │    │
        │        unknown)       │    └──► draining (not wanted any more) ──► forgotten
        │                       │ died, unreachable, wrong weights
        │                       ▼
        └──── restarted ◄──── fenced ──► gone (restarts used up)

Requests go out while at least one serving engine runs with weights that are verified or on trial: an engine on trial
gets requests while its canary is scored, and its answers wait on the client for its verification. During a publication
to all engines, from its pause until they are resumed, requests wait on the client, as they do while no engine is left.
Under a rolling publication at least one engine keeps running; requests sent to a paused one wait in its queue.

``version`` is the oldest that a serving engine holds: no request is served by weights older than at its dispatch.
The supervisor, the fleet and the router write here; the client reads. One event loop: no locks.

The client reads at every request and engines change rarely, so ``notify`` computes what it reads, once per change.
Until then it sees the state before, so a change that must stop requests is notified before the next ``await``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from miles_async.runtime.clock import now
from miles_async.runtime.loop_turns import LoopTurns
from miles_async.types import Incarnation

MOST_WRONG_ANSWERS = 3  # in WRONG_ANSWERS_WINDOW, before an engine is restarted: a sound one hardly ever gives one
WRONG_ANSWERS_WINDOW = 3600.0  # seconds
PAUSES = 24  # of an engine that are remembered
WOKEN_AT_ONCE = 3  # requests per turn of the event loop, half a millisecond each


class EngineState(Enum):
    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    FENCED = "fenced"
    GONE = "gone"


@dataclass(slots=True)
class EngineRecord:
    """Facts about one engine; ``incarnation`` changes when they become void."""

    engine_id: str
    ranks: int = 1
    streams: bool = False  # receives all buckets of a publication by one call
    state: EngineState = EngineState.STARTING
    incarnation: int = 0
    restarts: int = 0
    url: str | None = None
    paused: bool = False
    pauses: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=PAUSES))  # from, until
    verified: bool = False  # its weights are known to be ``version``
    on_trial: bool = False  # it says so; its answers wait until that is verified
    version: int | None = None  # with which it was last sent requests
    tokens_in_flight: int = 1  # tokens per request that one forward pass may yield, as of its last probe
    wrong_answers: tuple[float, ...] = ()  # times of recent ones
    reason: str = ""  # why it was last fenced

    @property
    def current(self) -> Incarnation:
        """Identity of the engine's current start."""
        return Incarnation(self.engine_id, self.incarnation)

    def pause(self) -> None:
        """Note that it is paused from now on."""
        if not self.paused:
            self.pauses.append((time.time(), None))
        self.paused = True

    def resume(self) -> None:
        """Note that it is no longer paused."""
        if self.pauses and self.pauses[-1][1] is None:
            self.pauses[-1] = (self.pauses[-1][0], time.time())
        self.paused = False

    def forget(self, state: EngineState) -> None:
        """Void everything known about this start of the engine, which is now in ``state``."""
        self.state = state
        self.incarnation += 1
        self.url = None
        self.resume()
        self.verified = self.on_trial = False
        self.version = None
        self.wrong_answers = ()


@dataclass(slots=True)
class EngineRegistry:
    """The engines of a run."""

    engines: dict[str, EngineRecord] = field(default_factory=dict)
    version: int = 0  # the oldest that serving engines hold; the dispatch version of new requests
    router_up: bool = False
    # As of the last notify():
    _open: bool = field(init=False)
    _taking: tuple[str, ...] = field(init=False)  # URLs of engines that take new requests
    _answering: dict[str, EngineRecord] = field(init=False)  # by URL
    _turns: LoopTurns = field(init=False, default_factory=lambda: LoopTurns(WOKEN_AT_ONCE))

    def __post_init__(self) -> None:
        self.notify()

    def in_state(self, state: EngineState) -> tuple[EngineRecord, ...]:
        """Engines in ``state``, in the order in which they were added."""
        return tuple(record for record in self.engines.values() if record.state is state)

    def may_dispatch(self) -> bool:
        """True if a new request may be sent now. O(1)."""
        return self._open

    def pick_serving(self, number: int) -> str:
        """URL of an engine that takes requests, another for each number. Call only while :meth:`may_dispatch`."""
        return self._taking[number % len(self._taking)]

    def answering_at(self, url: str) -> EngineRecord | None:
        """Engine at ``url`` if its answers count: it serves or is draining. O(1)."""
        return self._answering.get(url)

    def urls(self) -> tuple[str, ...]:
        """URLs of all engines that are up."""
        return tuple(record.url for record in self.engines.values() if record.url is not None)

    def note_wrong_answer(self, record: EngineRecord, problem: str) -> None:
        """Count an answer that does not fit its request. The supervisor restarts engines that give several."""
        recent = (when for when in record.wrong_answers if when > now() - WRONG_ANSWERS_WINDOW)
        record.wrong_answers = (*recent, now())
        if (count := len(record.wrong_answers)) >= MOST_WRONG_ANSWERS:
            record.reason = f"gave {count} wrong answers within {WRONG_ANSWERS_WINDOW:g} s; the last: {problem}"
            self.notify()

    def notify(self) -> None:
        """Compute what requests read and wake those whose condition holds now. Call it after every change."""
        serving = self.in_state(EngineState.SERVING)
        answering = (*serving, *self.in_state(EngineState.DRAINING))
        self._answering = {record.url: record for record in answering if record.url is not None}
        self._taking = tuple(
            r.url for r in serving if r.url is not None and (r.verified or r.on_trial) and not r.paused
        )
        self._open = self.router_up and bool(self._taking)
        self.version = min((r.version for r in serving if r.version is not None), default=self.version)
        self._turns.notify()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` holds. It is evaluated again after changes and must not raise."""
        await self._turns.until(condition)

    def describe(self) -> str:
        """Describe every engine's state and the router's in one line."""
        states = [
            f"{r.engine_id} {r.state.value}"
            + (" paused" if r.paused else "")
            + (" unverified" if r.state is EngineState.SERVING and not r.verified else "")
            for r in self.engines.values()
        ]
        return f"{', '.join(states) or 'no engines'}; router {'up' if self.router_up else 'down'}"
