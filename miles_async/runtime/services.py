"""Circuit breakers for services that rewards, environments and agents need.

An outage pauses the work that needs the service: it is reported once, one call at a time probes the service, and no
sample is charged for it (C6). An outage without end is the run's error.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import aiohttp
import structlog

from miles_async.errors import MilesAsyncError, OverdueError, ServiceOutageError, ServiceUnavailableError
from miles_async.runtime.clock import now
from miles_async.runtime.texts import shortened

log = structlog.get_logger(__name__)

OPEN_AFTER = 3  # failures in a row, without an answer in between
MAX_OVERDUE = 3  # deadlines that one call may miss while no other call is answered
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0  # seconds
_TOO_MANY_REQUESTS = 429  # the only 4xx that is not the request's fault
_FILES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_outage(error: BaseException) -> bool:
    """Return whether an error of user code means that a service is down: it or one of its causes is a failed
    connection, a timeout, HTTP status 429 or 5xx, or ServiceUnavailableError.
    """
    if isinstance(error, MilesAsyncError):
        return isinstance(error, ServiceUnavailableError)
    for cause in causes(error):
        if (status := _http_status(cause)) is not None:  # requests and urllib make OSErrors of refusals, too
            return status >= 500 or status == _TOO_MANY_REQUESTS
        is_connection = isinstance(cause, OSError | aiohttp.ClientConnectionError | ServiceUnavailableError)
        if is_connection and not isinstance(cause, _FILES):
            return True
    return False


def _http_status(error: BaseException) -> int | None:
    """HTTP status in an error of requests, httpx, OpenAI's client, aiohttp or urllib; None if there was no answer."""
    response = getattr(error, "response", None)
    found = (getattr(response, "status_code", None), getattr(error, "status", None))
    return next((status for status in found if isinstance(status, int) and 400 <= status < 600), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over the error and its causes: clients wrap the connection's error several times."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


class Circuit:
    """Circuit breaker of one service. Closed, calls go through; open, they wait, and one call per pause tries again."""

    def __init__(self, service: str, *, outage_timeout: float = math.inf, max_failures: int = 8) -> None:
        """``service``: its name in messages. ``outage_timeout``: seconds. ``max_failures``: of one call, while the
        service answers others.
        """
        self.service = service
        self.failures = 0
        self._answers = 0
        self._outage_timeout = outage_timeout
        self._max_failures = max_failures
        self._in_a_row = 0
        self._down_since: float | None = None  # None while it is not down
        self._outage_seconds = 0.0  # of outages that are over
        self._back_at = -math.inf  # end of the last of them
        self._last_error = ""
        self._pause = _SHORTEST_PAUSE
        self._closed = asyncio.Event()
        self._closed.set()
        self._door = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """True while the service counts as down."""
        return not self._closed.is_set()

    @property
    def paused_until(self) -> float:
        """Last time that work waited for the service, on the loop's clock: now during an outage, -inf if never."""
        if self._down_since is None:
            return self._back_at
        return min(now(), self._down_since + self._outage_timeout)

    @property
    def outage_seconds(self) -> float:
        """Seconds of all outages so far."""
        return self._outage_seconds + self._down_seconds()

    async def call[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what ``work`` returns, called again after each failure of the service, with backoff and jitter.

        A failure counts against the call only if the service answered others meanwhile. A missed deadline that does is
        the call's own at once: it would miss the next one, too.

        Raises:
            Exception: any error of ``work`` that :func:`is_outage` does not recognize.
            ServiceUnavailableError: it fails although the service answers others.
            OverdueError: it misses ``MAX_OVERDUE`` deadlines while no call is answered. May be its own fault or not.
            ServiceOutageError: the service has been down for longer than ``--service-outage-timeout``.
        """
        failures = own = overdue = 0
        while True:
            await self._admission()
            answers = self._answers
            try:
                result = await work()
            except Exception as error:  # all but failures of the service are raised again
                if not is_outage(error):
                    raise
                others_answered = self._answers != answers
                self._failed(error, counts=not others_answered)
                is_overdue = isinstance(error, OverdueError)
                own, overdue = own + others_answered, overdue + is_overdue
                if own > self._max_failures or (is_overdue and others_answered):
                    raise ServiceUnavailableError(f"{self.service}: {_text(error)}") from error
                if overdue >= MAX_OVERDUE:
                    raise OverdueError(f"{self.service}: {_text(error)}") from error
                if self._down_seconds() > self._outage_timeout:
                    raise ServiceOutageError(
                        f"expected {self.service} to be back within {self._outage_timeout:g} s "
                        f"(--service-outage-timeout), found it down for {self._down_seconds():.0f} s: {_text(error)}"
                    ) from error
            else:
                self._answers += 1
                self.works()
                return result
            await asyncio.sleep(_jittered(min(_SHORTEST_PAUSE * 2.0 ** min(failures, 10), _LONGEST_PAUSE)))
            failures += 1

    def works(self) -> None:
        """Note a sign of life from the service during a call."""
        self._in_a_row = 0
        if self.is_open:
            self._outage_seconds += self._down_seconds()
            self._back_at = now()
            log.info("service is back", service=self.service, after_seconds=round(self._down_seconds(), 1))
            self._down_since = None
            self._closed.set()

    def describe(self) -> str:
        """Describe the outage in one line, for ``stall.txt`` (C10)."""
        return f"{self.service} has been down for {self._down_seconds():.0f} s: {self._last_error}"

    def _down_seconds(self) -> float:
        """Seconds since the current outage began; 0 if there is none."""
        return 0.0 if self._down_since is None else now() - self._down_since

    def _failed(self, error: BaseException, *, counts: bool) -> None:
        """``counts``: False for a call that began before the last answer, and says nothing about now."""
        self.failures += 1
        self._last_error = _text(error)
        if not counts:
            return
        self._in_a_row += 1
        if self._in_a_row >= OPEN_AFTER and not self.is_open:
            self._down_since = now()
            self._pause = _SHORTEST_PAUSE
            self._closed.clear()
            log.warning("service is down, its work waits", service=self.service, error=self._last_error)

    async def _admission(self) -> None:
        """Wait while the circuit is open, until it is this call's turn to try the service."""
        if not self.is_open:
            return
        async with self._door:  # in order of arrival, so that no single sample decides for all
            with suppress(TimeoutError):
                async with asyncio.timeout(_jittered(self._pause)):
                    await self._closed.wait()
                    return
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class Services:
    """The circuits of a run, by the names of their services."""

    def __init__(self, *, outage_timeout: float = math.inf, max_failures: int = 8) -> None:
        """See Circuit."""
        self._outage_timeout = outage_timeout
        self._max_failures = max_failures
        self._circuits: dict[str, Circuit] = {}

    def circuit(self, service: str) -> Circuit:
        """Return the circuit of a service, one per name."""
        if service not in self._circuits:
            self._circuits[service] = Circuit(
                service, outage_timeout=self._outage_timeout, max_failures=self._max_failures
            )
        return self._circuits[service]

    def paused_until(self) -> float:
        """Last time that work waited for any service, on the loop's clock: now during an outage, -inf if never."""
        return max((circuit.paused_until for circuit in self._circuits.values()), default=-math.inf)

    def gauges(self) -> dict[str, float]:
        """Metrics over all services: how many are down now, failed calls and seconds of outages so far."""
        circuits = self._circuits.values()
        return {
            "services_down": sum(circuit.is_open for circuit in circuits),
            "service_failures": sum(circuit.failures for circuit in circuits),
            "service_outage_seconds": sum(circuit.outage_seconds for circuit in circuits),
        }

    def describe(self) -> list[str]:
        """Describe each service that is down in one line."""
        return [circuit.describe() for circuit in self._circuits.values() if circuit.is_open]


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)


def _text(error: BaseException) -> str:
    return shortened(str(error) if isinstance(error, MilesAsyncError) else repr(error))
