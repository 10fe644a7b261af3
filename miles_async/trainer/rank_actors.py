"""The ranks' processes: Ray actors that are placed together, and called all at once or one by one.

A rank that cannot be reached is called again until it answers (``runtime/cluster/actor_link.py``), while the others
wait for it. When a rank fails or is lost, all are killed, since the others would wait for it forever; the failure
surfaces with rank and cause, as ProcessLostError if a rank was lost, else as TrainerError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import ray
import structlog
from ray.exceptions import RayError, RayTaskError

from miles_async.errors import MilesAsyncError, ProcessLostError, StalledError, TrainerError
from miles_async.runtime.cluster.actor_link import ActorLink, why_gone
from miles_async.runtime.network.addresses import Network
from miles_async.trainer.actor import Thread, TrainerActor
from miles_async.trainer.placement import Placement

log = structlog.get_logger(__name__)


# A lost peer breaks collectives, so failures follow the first one: wait a little to name the cause.
GRACE_SECONDS = 2.0
LOST_PEER_SECONDS = 90.0  # if only lost peers are reported: Ray takes a minute to declare a node dead
LOST_PEER = 3  # the last in order of likely causes


class RankActors:
    """The processes of all ranks. None runs before :meth:`place` or after :meth:`kill`."""

    def __init__(self, world_size: int, placement: Placement, network: Network, log_directory: Path | None) -> None:
        self._world_size = world_size
        self._placement = placement
        self._network = network
        self._log_directory = log_directory
        self._handles: list[Any] = []  # Ray's, of TrainerActor, which have no types
        self._links: list[ActorLink] = []
        self._calls = 0  # on all ranks, under way

    @property
    def running(self) -> bool:
        return bool(self._handles)

    @property
    def idle(self) -> bool:
        """True if they run and no call on all ranks is under way."""
        return self.running and not self._calls

    async def place(self, timeout: float) -> None:
        """Start all processes, without models."""
        await self._placement.reserve(timeout)
        actor_class = ray.remote(concurrency_groups=dict.fromkeys(get_args(Thread), 1))(TrainerActor)
        self.connect([self._create(actor_class, rank) for rank in range(self._world_size)])

    def connect(self, handles: Sequence[Any]) -> None:
        """Call these actors from now on, in rank order."""
        self._handles = list(handles)
        self._links = [ActorLink(f"trainer rank {rank}", handle.ping.remote) for rank, handle in enumerate(handles)]

    def _create(self, actor_class: Any, rank: int) -> Any:
        log_file = self._log_directory / f"trainer-{rank}.log" if self._log_directory else None
        options = self._placement.options(rank)
        return actor_class.options(**options).remote(rank, self._world_size, network=self._network, log_file=log_file)

    async def call[*Ts, Result](
        self, method: Callable[[TrainerActor, *Ts], Result], arguments: Sequence[tuple[*Ts]], timeout: float
    ) -> list[Result]:
        """Call ``method`` on ranks 0, 1, …, with one tuple of ``arguments`` each. Answers in rank order.

        Raises TrainerError, ProcessLostError or the rank's own error, and StalledError past ``timeout`` seconds; no
        rank is left running then.
        """
        if not self._handles:
            raise TrainerError("the trainer is not running")
        results: dict[int, Result] = {}
        errors: dict[int, Exception] = {}

        async def settle(rank: int) -> None:
            try:
                results[rank] = await self._perform(rank, None, method, arguments[rank])
            except (RayError, ProcessLostError) as error:
                errors[rank] = error
                only_lost_peers = min(map(_order_of_cause, errors.values())) == LOST_PEER
                grace = asyncio.get_running_loop().time() + (LOST_PEER_SECONDS if only_lost_peers else GRACE_SECONDS)
                if not deadline.expired():
                    deadline.reschedule(min(grace, deadline.when() or grace))

        self._calls += 1
        try:
            async with asyncio.timeout(timeout) as deadline, asyncio.TaskGroup() as scope:
                for rank in range(len(arguments)):
                    scope.create_task(settle(rank))
        except TimeoutError:
            if not errors:
                self.kill()
                waiting = [rank for rank in range(len(arguments)) if rank not in results]
                raise StalledError(f"trainer ranks {waiting} did not answer within {timeout:g} s") from None
        finally:
            self._calls -= 1
        if errors:
            self.kill()
            raise cause_of(errors)
        return [results[rank] for rank in range(len(arguments))]

    async def call_one[*Ts, Result](
        self, rank: int, thread: Thread, method: Callable[[TrainerActor, *Ts], Result], *arguments: *Ts
    ) -> Result:
        """Call ``method`` in a thread of one rank. Errors don't affect other ranks, unless the rank was lost."""
        if not self._handles:
            raise TrainerError("the trainer is not running")
        try:
            return await self._perform(rank, thread, method, arguments)
        except RayTaskError as error:
            raise cause_of({rank: error}) from None
        except (RayError, ProcessLostError) as error:
            self.kill()
            raise cause_of({rank: error}) from None

    async def _perform[*Ts, Result](
        self, rank: int, thread: Thread | None, method: Callable[[TrainerActor, *Ts], Result], arguments: tuple[*Ts]
    ) -> Result:
        """Call ``method`` on one rank, repeatedly while it cannot be reached. ``thread``: None for the main one."""
        remote = self._handles[rank].perform.options(**({"concurrency_group": thread} if thread else {})).remote
        answer: Result = await self._links[rank].call(lambda call: remote(call, method, *arguments))
        return answer

    def kill(self) -> None:
        """Kill all processes. Safe to call twice."""
        handles, self._handles = self._handles, []
        for handle in handles:
            ray.kill(handle, no_restart=True)

    def end(self) -> None:
        """Kill all processes and release their placement."""
        self.kill()
        self._placement.release()


def cause_of(errors: Mapping[int, Exception]) -> MilesAsyncError:
    """Choose the error to raise among those within the grace time: the likely cause of the others."""
    rank, error = min(errors.items(), key=lambda item: (_order_of_cause(item[1]), item[0]))
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, MilesAsyncError):
        return cause
    others = sorted(set(errors) - {rank})
    also = f" (ranks {others} failed after it)" if others else ""
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return ProcessLostError(f"trainer rank {rank} died{also}: {why_gone(error)}")
    text = str(cause).strip() or repr(cause)
    log.error("trainer rank failed", rank=rank, traceback=str(error))
    if _order_of_cause(error) == LOST_PEER:  # and no rank reports that it was lost
        return ProcessLostError(f"trainer rank {rank} lost the connection to another{also}: {text}")
    return TrainerError(f"trainer rank {rank} failed{also}: {type(cause).__name__}: {text}")


def _order_of_cause(error: Exception) -> int:
    """Rank by likely cause: lost process, our error, other, lost peer."""
    if isinstance(error, ProcessLostError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError)):
        return 0
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, MilesAsyncError):
        return 1
    text = str(cause).lower()
    lost_peer = any(
        sign in text for sign in ("connection closed by peer", "connection reset", "broken pipe", "recv", "timed out")
    )
    return LOST_PEER if lost_peer else 2
