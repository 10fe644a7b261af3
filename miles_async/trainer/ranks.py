"""The trainer's ranks as one object: TrainerSide on top of Ray actors.

A collective call is made on all ranks at once, and the next one when all have answered. A rank that cannot be reached
is called again until it answers (``runtime/cluster/actor_link.py``), while the others wait for it. When a rank fails or
is lost, all are killed, since the others would wait for it forever; the failure surfaces with rank and cause, as
ProcessLostError if a rank was lost, else as TrainerError.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import msgspec
import ray
import structlog
from ray.exceptions import RayError, RayTaskError

from miles_async.api import Metrics
from miles_async.errors import MilesAsyncError, ProcessLostError, StalledError, TrainerError
from miles_async.runtime.cluster.actor_link import ActorLink, why_gone
from miles_async.runtime.files.digests import joined, split
from miles_async.runtime.files.whole_file import write_whole
from miles_async.runtime.network.addresses import LOCAL, Network
from miles_async.runtime.tasks import gathered, quietly
from miles_async.seams import WeightSender
from miles_async.trainer.actor import (
    THREADS,
    BackendFactory,
    RankInfo,
    SenderFactory,
    Thread,
    TrainerActor,
)
from miles_async.trainer.placement import Placement, RankResources
from miles_async.trainer.profiling import Profiling
from miles_async.types import RanksReport, RankTimes, SettingValue, StagedWeights, TokenScores, WeightDelta

log = structlog.get_logger(__name__)

Ts = TypeVarTuple("Ts")
Result = TypeVar("Result")

# A lost peer breaks collectives, so failures follow the first one: wait a little to name the cause.
GRACE_SECONDS = 2.0
IDLE_PING_SECONDS = 5.0
LOST_PEER_SECONDS = 90.0  # if only lost peers are reported: Ray takes a minute to declare a node dead
SENDER_CLOSE_SECONDS = 5.0
TIMED_STEPS = 20  # the last ones
LOST_PEER = 3  # the last in order of likely causes


class TrainerRanks:
    """Implements TrainerSide. Nothing runs before :meth:`start` or after :meth:`stop`."""

    def __init__(
        self,
        *,
        world_size: int,
        resources: RankResources,
        nodes: int = 1,
        node_ids: Sequence[str] = (),
        backend: BackendFactory,
        sender: SenderFactory,
        senders: int = 1,
        canary_tokens: Sequence[int] = (),
        network: Network = LOCAL,
        log_directory: Path | None = None,
        times_file: Path | None = None,
        profiling: Profiling | None = None,
        start_timeout: float = 600.0,
        step_timeout: float = 3600.0,
    ) -> None:
        """The callables run in the actors and must be picklable. ``node_ids``: the nodes, if already chosen.
        ``senders``: number of pipeline stages that send weights. ``canary_tokens``: scored by :meth:`copy_weights`,
        unless empty; may be set later. ``times_file``: gets what the last steps took on each rank. Timeouts in
        seconds: of :meth:`start`, and of any other call on all ranks.
        """
        self._world_size = world_size
        self._placement = Placement(resources, nodes, world_size // nodes, node_ids)
        self._threads = resources.threads
        self._backend, self._sender, self._senders = backend, sender, senders
        self.canary_tokens = tuple(canary_tokens)
        self.token_scores: Sequence[TokenScores] = ()
        self._network = network
        self._log_directory = log_directory
        self._times_file = times_file
        self._times: deque[tuple[RankTimes, ...]] = deque(maxlen=TIMED_STEPS)
        self._profiling = profiling
        self._start_timeout, self._step_timeout = start_timeout, step_timeout
        self._actors: list[Any] = []  # Ray's handles of TrainerActor, which have no types
        self._links: list[ActorLink] = []
        self._ranks: list[RankInfo] = []
        self._staged_in: Path | None = None  # the first sender's directory
        self._saved: dict[str, str] = {}  # digests of a staged save that was written at once
        self._calls = 0  # on all ranks, under way

    async def start(self) -> None:
        """Start all ranks and load their models.

        Raises ConfigurationError, TrainerError, ProcessLostError or StalledError, with nothing left running.
        """
        try:
            if not self._actors:
                await self._place()
            [(address, port)] = await self._call(TrainerActor.listen, [()], self._start_timeout)
            ready = address, port, self._backend, self._sender, self._senders, self._threads, self._profiling
            self._ranks = await self._call(TrainerActor.initialize, [ready] * self._world_size, self._start_timeout)
        except BaseException:
            await quietly(self.stop())
            raise

    async def locations(self) -> Sequence[tuple[str, str]]:
        """Start the processes of all ranks, without models. Return node and GPU of each.

        Raises as :meth:`start`, which comes next.
        """
        try:
            await self._place()
            return await self._call(TrainerActor.location, [()] * self._world_size, self._start_timeout)
        except BaseException:
            await quietly(self.stop())
            raise

    async def _place(self) -> None:
        await self._placement.reserve(self._start_timeout)
        actor_class = ray.remote(concurrency_groups=dict.fromkeys(THREADS, 1))(TrainerActor)
        self._actors = [self._create(actor_class, rank) for rank in range(self._world_size)]
        self._links = [ActorLink(f"trainer rank {rank}", actor.ping.remote) for rank, actor in enumerate(self._actors)]

    @property
    def data_parallel_size(self) -> int:
        """Number of shards per batch; known once started."""
        return 1 + max(info.data_parallel_rank for info in self._ranks)

    @property
    def ranks(self) -> Sequence[RankInfo]:
        return tuple(self._ranks)

    @property
    def changes_settings(self) -> bool:
        """True if the backend's settings may change (:meth:`change`); known once started."""
        return all(info.changes_settings for info in self._ranks)

    async def change(self, values: Mapping[str, SettingValue]) -> None:
        await self._on_all(TrainerActor.change, dict(values))

    async def train(self, shards: Sequence[Any]) -> Metrics:
        """``shards``: a TrainShard, or a reference to one, per data-parallel rank. Metrics are over all ranks."""
        if len(shards) != self.data_parallel_size:
            raise TrainerError(
                f"expected {self.data_parallel_size} shards, one per data-parallel rank, got {len(shards)}"
            )
        own = [(shards[info.data_parallel_rank],) for info in self._ranks]
        metrics, scores, times = zip(*await self._call(TrainerActor.train, own, self._step_timeout), strict=True)
        self.token_scores = [*chain.from_iterable(scores)]
        await self._write_times(times)
        first: Metrics = metrics[0]
        return first

    async def _write_times(self, step: tuple[RankTimes, ...]) -> None:
        if self._times_file is None:
            return
        self._times.append(step)
        report = RanksReport(steps=tuple(self._times))
        try:
            await asyncio.to_thread(lambda file: write_whole(file, msgspec.json.encode(report)), self._times_file)
        except OSError as error:  # the page lacks them; that is no reason to stop
            log.warning("times of ranks cannot be written any more", error=str(error))
            self._times_file = None

    async def copy_weights(self, version: int) -> None:
        await self._on_all(TrainerActor.copy_weights, version, self.canary_tokens)

    async def stage_weights(self, version: int) -> StagedWeights:
        senders = sorted(info.sender for info in self._ranks if info.sender is not None)
        work = [self.on_sender(sender, "weights", TrainerActor.stage_weights, version) for sender in senders]
        staged = united(await gathered(*work))
        if (place := Path(staged.directory).parent) != self._staged_in:
            self._staged_in = place
            log.info("weights are staged", directory=str(place), gigabytes=round(staged.total_bytes / 1e9, 1))
        return staged

    def sender(self, index: int, *, repair: bool = False) -> RankSender:
        return RankSender(self, index, "repairs" if repair else "weights")

    async def on_sender(
        self, index: int, thread: Thread, method: Callable[[TrainerActor, *Ts], Result], *arguments: *Ts
    ) -> Result:
        """Call ``method`` on the rank with sender ``index``."""
        rank = next((info.rank for info in self._ranks if info.sender == index), 0)
        return await self._call_one(rank, thread, method, *arguments)

    async def offload(self) -> None:
        """Free the GPUs' memory until :meth:`onload`; nothing else may be called in between."""
        await self._on_all(TrainerActor.offload)

    async def onload(self) -> None:
        await self._on_all(TrainerActor.onload)

    async def save(self, directory: Path) -> Mapping[str, str]:
        return dict(ChainMap(*await self._on_all(TrainerActor.save, directory)))

    async def stage_save(self, directory: Path) -> None:
        self._saved = dict(ChainMap(*await self._on_all(TrainerActor.stage_save, directory)))

    async def write_save(self) -> Mapping[str, str]:
        try:
            async with asyncio.timeout(self._step_timeout):
                parts = await gathered(
                    *(self._call_one(rank, "saves", TrainerActor.write_save) for rank in range(self._world_size))
                )
                return {**self._saved, **await self._call_one(0, "saves", TrainerActor.finish_save, parts)}
        except TimeoutError:
            self._kill()
            raise StalledError(
                f"trainer ranks did not write their checkpoint within {self._step_timeout:g} s"
            ) from None

    async def supervise(self) -> None:
        """Notice that an idle rank was lost; never returns. Raises as :meth:`train`."""
        while True:
            await asyncio.sleep(IDLE_PING_SECONDS)
            if self._actors and not self._calls:  # calls notice it themselves, and name the cause
                await self._on_all(TrainerActor.ping)

    async def save_hf(self, directory: Path) -> None:
        await self._on_all(TrainerActor.save_hf, directory)

    async def load(self, directory: Path, *, step: int) -> None:
        await self._on_all(TrainerActor.load, directory, step)

    async def digests(self, directory: Path, sizes: Mapping[str, int]) -> Mapping[str, str]:
        pieces = split(sizes)
        share = -(-len(pieces) // self._world_size)
        shares = [(directory, pieces[share * rank : share * (rank + 1)]) for rank in range(self._world_size)]
        read = await self._call(TrainerActor.read_pieces, shares, self._step_timeout)
        return joined(pieces, chain.from_iterable(read))

    async def stop(self) -> None:
        """End all processes and remove the senders' files. Idempotent."""
        senders = [info.sender for info in self._ranks if info.sender is not None] if self._actors else []
        with suppress(TimeoutError, MilesAsyncError):  # a sender may be stuck or dead
            async with asyncio.timeout(SENDER_CLOSE_SECONDS):
                await asyncio.gather(*(self.sender(index).call(WeightSender.close) for index in senders))
        self._kill()
        self._placement.release()

    # --------------------------------------------------------------------------------------------- calls
    def _create(self, actor_class: Any, rank: int) -> Any:
        log_file = self._log_directory / f"trainer-{rank}.log" if self._log_directory else None
        options = self._placement.options(rank)
        return actor_class.options(**options).remote(rank, self._world_size, network=self._network, log_file=log_file)

    async def _on_all(self, method: Callable[[TrainerActor, *Ts], Result], *arguments: *Ts) -> list[Result]:
        return await self._call(method, [arguments] * self._world_size, self._step_timeout)

    async def _call(
        self, method: Callable[[TrainerActor, *Ts], Result], arguments: Sequence[tuple[*Ts]], timeout: float
    ) -> list[Result]:
        """Call ``method`` on ranks 0, 1, …, with one tuple of ``arguments`` each. Answers in rank order."""
        if not self._actors:
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
                self._kill()
                waiting = [rank for rank in range(len(arguments)) if rank not in results]
                raise StalledError(f"trainer ranks {waiting} did not answer within {timeout:g} s") from None
        finally:
            self._calls -= 1
        if errors:
            self._kill()
            raise _cause(errors)
        return [results[rank] for rank in range(len(arguments))]

    async def _call_one(
        self, rank: int, thread: Thread, method: Callable[[TrainerActor, *Ts], Result], *arguments: *Ts
    ) -> Result:
        """Call ``method`` in a thread of one rank. Errors don't affect other ranks, unless the rank was lost."""
        if not self._actors:
            raise TrainerError("the trainer is not running")
        try:
            return await self._perform(rank, thread, method, arguments)
        except RayTaskError as error:
            raise _cause({rank: error}) from None
        except (RayError, ProcessLostError) as error:
            self._kill()
            raise _cause({rank: error}) from None

    async def _perform(
        self, rank: int, thread: Thread | None, method: Callable[[TrainerActor, *Ts], Result], arguments: tuple[*Ts]
    ) -> Result:
        """Call ``method`` on one rank, repeatedly while it cannot be reached. ``thread``: None for the main one."""
        remote = self._actors[rank].perform.options(**({"concurrency_group": thread} if thread else {})).remote
        answer: Result = await self._links[rank].call(lambda call: remote(call, method, *arguments))
        return answer

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)


@dataclass(frozen=True, slots=True)
class RankSender:
    """Implements SenderHandle: calls a rank's weight sender in one of its threads."""

    ranks: TrainerRanks
    index: int
    thread: Thread

    async def call(self, method: Callable[[Any, *Ts], Result], *arguments: *Ts) -> Result:
        return await self.ranks.on_sender(self.index, self.thread, TrainerActor.call_sender, method, arguments)


def united(shares: Sequence[StagedWeights]) -> StagedWeights:
    """Merge the senders' shares, in order of sending, into one manifest."""
    deltas = [share.delta for share in shares if share.delta is not None]
    delta = None
    if len(deltas) == len(shares):
        delta = WeightDelta(
            base_version=deltas[0].base_version, bucket_bytes=dict(ChainMap(*(each.bucket_bytes for each in deltas)))
        )
    return msgspec.structs.replace(
        shares[0],
        buckets=dict(sorted(ChainMap(*(share.buckets for share in shares)).items())),
        total_bytes=sum(share.total_bytes for share in shares),
        delta=delta,
        copy_seconds=max(share.copy_seconds for share in shares),
        prepare_seconds=max(share.prepare_seconds for share in shares),
    )


def _cause(errors: Mapping[int, Exception]) -> MilesAsyncError:
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
    if _order_of_cause(error) == LOST_PEER:  # and no rank reports being the lost one
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
