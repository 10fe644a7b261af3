"""The trainer's ranks as one object: TrainerSide on top of Ray actors.

A collective call is made on all ranks at once, and the next one when all have answered (``rank_actors.py``).
"""

from __future__ import annotations

import asyncio
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import structlog

from miles_async.api import Metrics
from miles_async.errors import MilesAsyncError, StalledError, TrainerError
from miles_async.runtime.files.digests import joined, split
from miles_async.runtime.files.whole_file import write_whole
from miles_async.runtime.network.addresses import LOCAL, Network
from miles_async.runtime.tasks import gathered, quietly
from miles_async.seams import WeightSender
from miles_async.trainer.actor import (
    BackendFactory,
    RankInfo,
    SenderFactory,
    Thread,
    TrainerActor,
)
from miles_async.trainer.placement import Placement, RankResources
from miles_async.trainer.profiling import Profiling
from miles_async.trainer.rank_actors import RankActors
from miles_async.types import RanksReport, RankTimes, SettingValue, StagedWeights, TokenScores, WeightDelta

log = structlog.get_logger(__name__)

IDLE_PING_SECONDS = 5.0
SENDER_CLOSE_SECONDS = 5.0
TIMED_STEPS = 20  # the last ones


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
        placement = Placement(resources, nodes, world_size // nodes, node_ids)
        self._actors = RankActors(world_size, placement, network, log_directory)
        self._threads = resources.threads
        self._backend, self._sender, self._senders = backend, sender, senders
        self.canary_tokens = tuple(canary_tokens)
        self.token_scores: Sequence[TokenScores] = ()
        self._times_file = times_file
        self._times: deque[tuple[RankTimes, ...]] = deque(maxlen=TIMED_STEPS)
        self._profiling = profiling
        self._start_timeout, self._step_timeout = start_timeout, step_timeout
        self._ranks: list[RankInfo] = []
        self._staged_in: Path | None = None  # the first sender's directory
        self._saved: dict[str, str] = {}  # digests of a staged save that was written at once

    async def start(self) -> None:
        """Start all ranks and load their models.

        Raises ConfigurationError, TrainerError, ProcessLostError or StalledError, with nothing left running.
        """
        try:
            if not self._actors.running:
                await self._actors.place(self._start_timeout)
            [(address, port)] = await self._call_at_start(TrainerActor.listen, [()])
            ready = address, port, self._backend, self._sender, self._senders, self._threads, self._profiling
            self._ranks = await self._call_at_start(TrainerActor.initialize, [ready] * self._world_size)
        except BaseException:
            await quietly(self.stop())
            raise

    async def locations(self) -> Sequence[tuple[str, str]]:
        """Start the processes of all ranks, without models. Return node and GPU of each.

        Raises as :meth:`start`, which comes next.
        """
        try:
            await self._actors.place(self._start_timeout)
            return await self._call_at_start(TrainerActor.location, [()] * self._world_size)
        except BaseException:
            await quietly(self.stop())
            raise

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
        metrics, scores, times = zip(*await self._actors.call(TrainerActor.train, own, self._step_timeout), strict=True)
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
        except OSError as error:  # the page lacks them, which must not end the run
            log.warning("times of ranks can no longer be written", error=str(error))
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

    async def on_sender[*Ts, Result](
        self, index: int, thread: Thread, method: Callable[[TrainerActor, *Ts], Result], *arguments: *Ts
    ) -> Result:
        """Call ``method`` on the rank with sender ``index``."""
        rank = next((info.rank for info in self._ranks if info.sender == index), 0)
        return await self._actors.call_one(rank, thread, method, *arguments)

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
                    *(self._actors.call_one(rank, "saves", TrainerActor.write_save) for rank in range(self._world_size))
                )
                return {**self._saved, **await self._actors.call_one(0, "saves", TrainerActor.finish_save, parts)}
        except TimeoutError:
            self._actors.kill()
            raise StalledError(
                f"trainer ranks did not write their checkpoint within {self._step_timeout:g} s"
            ) from None

    async def supervise(self) -> None:
        """Watch idle ranks for losses; never returns. Raises as :meth:`train`."""
        while True:
            await asyncio.sleep(IDLE_PING_SECONDS)
            if self._actors.idle:  # calls notice it themselves, and name the cause
                await self._on_all(TrainerActor.ping)

    async def save_hf(self, directory: Path) -> None:
        await self._on_all(TrainerActor.save_hf, directory)

    async def load(self, directory: Path, *, step: int) -> None:
        await self._on_all(TrainerActor.load, directory, step)

    async def digests(self, directory: Path, sizes: Mapping[str, int]) -> Mapping[str, str]:
        pieces = split(sizes)
        share = -(-len(pieces) // self._world_size)
        shares = [(directory, pieces[share * rank : share * (rank + 1)]) for rank in range(self._world_size)]
        read = await self._actors.call(TrainerActor.read_pieces, shares, self._step_timeout)
        return joined(pieces, chain.from_iterable(read))

    async def stop(self) -> None:
        """End all processes and remove the senders' files. Idempotent."""
        senders = [info.sender for info in self._ranks if info.sender is not None] if self._actors.running else []
        with suppress(TimeoutError, MilesAsyncError):  # a sender may be stuck or dead
            async with asyncio.timeout(SENDER_CLOSE_SECONDS):
                await asyncio.gather(*(self.sender(index).call(WeightSender.close) for index in senders))
        self._actors.end()

    async def _call_at_start[*Ts, Result](
        self, method: Callable[[TrainerActor, *Ts], Result], arguments: Sequence[tuple[*Ts]]
    ) -> list[Result]:
        try:
            return await self._actors.call(method, arguments, self._start_timeout)
        except StalledError as error:
            raise StalledError(f"{error} at startup (--trainer-start-timeout)") from None

    async def _on_all[*Ts, Result](
        self, method: Callable[[TrainerActor, *Ts], Result], *arguments: *Ts
    ) -> list[Result]:
        return await self._actors.call(method, [arguments] * self._world_size, self._step_timeout)


@dataclass(frozen=True, slots=True)
class RankSender:
    """Implements SenderHandle: calls a rank's weight sender in one of its threads."""

    ranks: TrainerRanks
    index: int
    thread: Thread

    async def call[*Ts, Result](self, method: Callable[[Any, *Ts], Result], *arguments: *Ts) -> Result:
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
