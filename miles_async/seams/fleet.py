"""All engines, as the publisher and the transports see them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from miles_async.seams.server import InferenceServer
from miles_async.types import FleetMembers, Incarnation

EngineErrors = Mapping[Incarnation, Exception | None]


class EngineFleet(Protocol):
    """The engines as the publisher and the transports see them.

    An engine is named by its incarnation: if it has been restarted, even while it was called, the result is an error
    and nothing of the call counts for the new start.
    """

    async def members(self) -> FleetMembers: ...

    async def call[*Ts, Result](
        self,
        engines: Sequence[Incarnation],
        operation: Callable[[InferenceServer, str, *Ts, float], Coroutine[Any, Any, Result]],
        *arguments: *Ts,
        brief: bool = False,
    ) -> Mapping[Incarnation, Result | Exception]:
        """Run an operation on these engines concurrently, each with the deadline that the operation has.

        Returns the answer or error of each engine; raises only for bugs in the fleet. ``brief``: wait
        a few seconds at most, since a healthy engine needs no time or the answer is not needed.

        ``pause`` also holds new requests back on the client until ``resume``. An operation that replaces weights makes
        them unverified until :meth:`admit`: no request goes out before :meth:`begin_trial`, and no answer counts.

        >>> errors = await fleet.call(engines, InferenceServer.pause, "retract")
        """
        ...

    async def stream_sent(self, engines: Sequence[Incarnation], *, broken: bool) -> None:
        """Start the deadline of these engines' ``receive_stream``: its senders have finished. ``broken``: with an
        error, which live engines see, too.
        """
        ...

    async def on_host[*Ts, Result](
        self,
        engines: Sequence[Incarnation],
        function: Callable[[Path, *Ts], Result],
        *arguments: *Ts,
        room: int = 0,
    ) -> Mapping[Incarnation, Result | Exception]:
        """Call ``function(directory, *arguments)`` in a thread on each engine's host; return as :meth:`call` does.

        ``directory`` belongs to this start of the engine and is removed with it; it is in memory if there is ``room``
        for that many bytes, else on disk. References to objects in ``arguments`` are resolved on the host. An engine on
        several nodes calls it on each, with the same path: the answer is None if one is, else the first node's.
        """
        ...

    async def begin_trial(self, engines: Sequence[Incarnation], version: int) -> None:
        """Send new requests, under ``version``, to these engines if they serve. Answers are held back on the client
        until :meth:`admit`, and discarded if the engine is fenced instead.
        """
        ...

    async def admit(self, engines: Sequence[Incarnation], version: int) -> EngineErrors:
        """Make (or keep) engines routable that hold ``version``, verified, unless they claim another version."""
        ...

    async def fence(self, engines: Sequence[Incarnation], reason: str) -> None:
        """Take engines out of the router, end their requests and restart them; they come back as joining. No-op for
        engines that have been restarted already.
        """
        ...


@dataclass(frozen=True, slots=True)
class PerEngine[T]:
    """An argument of :meth:`EngineFleet.call` with a value for each engine."""

    values: Mapping[Incarnation, T]


def per_engine[T](values: Mapping[Incarnation, T]) -> T:
    """Pass each engine its own value: a :class:`PerEngine`, typed as what the operation takes.

    >>> await fleet.call(engines, InferenceServer.load_files, per_engine(directories), version)
    """
    return cast(T, PerEngine(values))


def arguments_of(engine: Incarnation, arguments: Iterable[object]) -> list[object]:
    """Arguments of a call as ``engine`` gets them."""
    return [each.values[engine] if isinstance(each, PerEngine) else each for each in arguments]
