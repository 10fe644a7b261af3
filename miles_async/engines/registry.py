"""Which engines there are, in what state, and whether requests may go out. The truth; the router mirrors it.

::

    starting ──► joining ──► serving
        ▲       (weights        │    │
        │        unknown)       │    └──► draining (not wanted any more) ──► forgotten
        │                       │ died, unreachable, wrong weights
        │                       ▼
        └──── restarted ◄──── fenced ──► gone (restarts used up)

Requests go out while some serving engine runs, with verified weights: from the pause of a publication to all
engines until its commit they wait at our side, as they do while no engine is left. Under a rolling publication some
engine always runs; what is sent to one that is paused waits in its queue, and its answers wait for its verification.

``version`` is the oldest that a serving engine holds: nothing older than at its dispatch serves a request.
Only ``Fleet`` and ``Router`` write here; the client reads. One event loop: no locks.

The client asks at every request, engines change rarely: what it asks is worked out in ``notify``, once per change.
Until then it sees what was, so a change that must stop requests is notified before the next ``await``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from miles_async.types import Incarnation

WOKEN_AT_ONCE = 3  # requests, of about half a millisecond each


class EngineState(Enum):
    """Where an engine is in its life."""

    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    FENCED = "fenced"
    GONE = "gone"


@dataclass(slots=True)
class EngineRecord:
    """What is known of one engine. ``incarnation`` changes whenever what we knew of it became void."""

    engine_id: str
    ranks: int = 1
    state: EngineState = EngineState.STARTING
    incarnation: int = 0
    restarts: int = 0
    url: str | None = None
    paused: bool = False
    verified: bool = False  # its weights are those of ``version``
    version: int | None = None  # that it was last admitted with
    tokens_in_flight: int = 1  # one forward pass yields so many per request, as it said when it was last probed
    reason: str = ""  # why it was last fenced

    @property
    def current(self) -> Incarnation:
        """This start of the engine."""
        return Incarnation(self.engine_id, self.incarnation)


@dataclass(slots=True)
class EngineRegistry:
    """All engines of a run."""

    engines: dict[str, EngineRecord] = field(default_factory=dict)
    version: int = 0  # the oldest that serving engines hold; the dispatch version of new requests
    router_up: bool = False
    # As of the last notify():
    _open: bool = field(init=False)
    _taking: tuple[str, ...] = field(init=False)  # URLs of those that take new requests
    _answering: dict[str, EngineRecord] = field(init=False)  # by URL
    _waiting: dict[asyncio.Future[None], Callable[[], bool]] = field(init=False, default_factory=dict)
    _waking: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.notify()

    def in_state(self, state: EngineState) -> tuple[EngineRecord, ...]:
        """Engines in ``state``, in the order of their ids."""
        return tuple(record for record in self.engines.values() if record.state is state)

    def may_dispatch(self) -> bool:
        """Whether a new request may go out now. O(1)."""
        return self._open

    def pick_serving(self, number: int) -> str:
        """URL of an engine that takes requests, another for each number. Call only while :meth:`may_dispatch`."""
        return self._taking[number % len(self._taking)]

    def answering_at(self, url: str) -> EngineRecord | None:
        """The engine behind ``url`` if its answers count: it serves, or is being drained. O(1)."""
        return self._answering.get(url)

    def urls(self) -> tuple[str, ...]:
        """Of all engines that are up."""
        return tuple(record.url for record in self.engines.values() if record.url is not None)

    def notify(self) -> None:
        """To be called after every change: works out what requests ask, and sees to it that who waits asks again."""
        serving = self.in_state(EngineState.SERVING)
        answering = (*serving, *self.in_state(EngineState.DRAINING))
        self._answering = {record.url: record for record in answering if record.url is not None}
        self._taking = tuple(r.url for r in serving if r.url is not None and r.verified and not r.paused)
        self._open = self.router_up and bool(self._taking)
        self.version = min((r.version for r in serving if r.version is not None), default=self.version)
        self._wake_soon()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until ``condition()`` holds. It is asked again after changes, on the waker's turn: it must not raise."""
        while not condition():
            waiting = asyncio.get_running_loop().create_future()
            self._waiting[waiting] = condition
            try:
                await waiting
            finally:
                del self._waiting[waiting]

    def _wake_soon(self) -> None:
        if self._waiting and not self._waking:  # once per turn of the loop, however much changes in it
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        """Not all at once: a thousand requests that go on in one turn of the loop block it for half a second."""
        self._waking = False
        ready = (waiting for waiting, condition in self._waiting.items() if not waiting.done() and condition())
        woken = list(itertools.islice(ready, WOKEN_AT_ONCE))
        for waiting in woken:
            waiting.set_result(None)
        if len(woken) == WOKEN_AT_ONCE:
            self._wake_soon()

    def describe(self) -> str:
        """One line for messages: what keeps requests from going out."""
        states = [
            f"{r.engine_id} {r.state.value}"
            + (" paused" if r.paused else "")
            + (" unverified" if r.state is EngineState.SERVING and not r.verified else "")
            for r in self.engines.values()
        ]
        return f"{', '.join(states) or 'no engines'}; router {'up' if self.router_up else 'down'}"
