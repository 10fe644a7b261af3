"""Transports of weights: the half in the driver, the halves in the sending ranks, and calls of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from miles_async.seams.fleet import EngineErrors
from miles_async.types import Incarnation, StagedWeights


class SenderHandle[Half](Protocol):
    """A sending rank's half of the weight transport, as the driver calls it."""

    async def call[*Ts, Result](self, method: Callable[[Half, *Ts], Result], *arguments: *Ts) -> Result:
        """Run ``method``, named by the protocol that the rank's half implements, in the rank's process.

        Training continues meanwhile. Calls to one sender run in one thread, in order; calls through a handle for
        repairs run in another thread, so that a repair that hangs delays no delivery.

        >>> await sender.call(WeightSender.pin, 12)
        """
        ...


class WeightSenders(Protocol):
    """The sending ranks as the publisher and the transports see them."""

    def sender(self, index: int, *, repair: bool = False) -> SenderHandle[Any]:
        """Handle of one sending rank, whose half depends on the transport; ``repair``: for repairs, which overlap
        deliveries.
        """
        ...


class WeightTransport(Protocol):
    """The driver's half of a weight transport: brings staged weights to engines. The other half is a WeightSender."""

    sent_fraction: float  # bytes sent to each engine in the last delivery ÷ bytes of the weights; mean over engines

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Prepare the delivery while the engines generate. Return the errors of the engines that failed."""
        ...

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Bring the weights to paused, prepared engines. Return the errors of engines that failed; others hold all."""
        ...

    async def close(self) -> None:
        """Release resources kept between deliveries, such as process groups."""
        ...


class WeightSender(Protocol):
    """The sending rank's half of a weight transport. It keeps the newest staged versions, and pinned ones.

    A driver's half that calls more extends this protocol.
    """

    def copy(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy this sender's share of all exported (HF name, torch tensor) to host memory. Training waits for it."""
        ...

    def stage(self, version: int) -> StagedWeights:
        """Write the latest copy to files, in another thread; the canary is added later."""
        ...

    def pin(self, version: int) -> None:
        """Keep the files of ``version``, however many versions are staged after it."""
        ...

    def unpin(self, version: int) -> None:
        """Undo one :meth:`pin`: without others, the next staged version may replace it."""
        ...

    def close(self) -> None:
        """Remove the files, leave process groups; idempotent."""
        ...
