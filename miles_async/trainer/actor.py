"""One trainer rank as a Ray actor: the training backend, and on sending ranks a weight sender.

Methods block, in several threads: the main one for ``train`` and all that is collective, and one each for staging and
sending weights, for repairs of engines, for writing checkpoints and for pings. So neither file writes nor an
unresponsive engine delays training, and a failed repair delays no delivery.

All calls come through :meth:`TrainerActor.perform`, which executes each once, however often it is repeated: no rank
takes a step twice or runs ahead of the others after a lost link.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import ray

from miles_async.api import (
    ChangesSettings,
    LeavesDevice,
    SavesInBackground,
    ScoresTokens,
    TimesParts,
    TrainBackend,
)
from miles_async.errors import CheckpointError, ConfigurationError
from miles_async.runtime.cluster.call_once import CallId, CallOnce
from miles_async.runtime.files.digests import Piece, read_pieces, write_digested
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.processes.output import redirect_output
from miles_async.seams import WeightSender
from miles_async.trainer.profiling import Profiling, RankProfiler
from miles_async.types import RankTimes, SettingValue, StagedWeights, TokenScores, TrainShard

if TYPE_CHECKING:  # the driver imports this module, and has no use for torch
    import torch.distributed as dist


BackendFactory = Callable[..., TrainBackend]
"""Called with rank, world_size, local_rank and store."""

SenderFactory = Callable[..., WeightSender]
"""Called on sending ranks with this node's address, ``sender`` and ``senders``: its index and their number."""

Thread = Literal["weights", "repairs", "saves", "pings"]
"""A rank's threads besides the main one."""

POSITION_FILE = "position.json"  # in the trainer's part of a checkpoint; checkpoints/files.py compares it


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Facts about a rank that TrainerRanks learns when it starts."""

    rank: int
    data_parallel_rank: int
    sender: int | None  # its index among the weight senders
    pid: int
    changes_settings: bool = False  # its backend's settings may change


@dataclass(frozen=True, slots=True)
class _Canary:
    """The canary, scored with the weights that were copied last."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    before: tuple[float, ...] = ()  # with the previous weights
    copy_seconds: float = 0.0  # of copying and scoring


class TrainerActor:
    """TrainerRanks calls :meth:`perform`, which calls the other methods, and :meth:`ping`.

    Every method is called on all ranks at once, except :meth:`listen` and :meth:`finish_save` (rank 0), and
    :meth:`stage_weights` and :meth:`call_sender` (sending ranks).
    """

    def __init__(self, rank: int, world_size: int, *, network: Network, log_file: Path | None) -> None:
        if log_file is not None:
            redirect_output(log_file)
        warnings.filterwarnings("ignore", module="megatron")  # about absent fused kernels
        self._rank = rank
        self._world_size = world_size
        self._network = network
        self._store: dist.Store | None = None
        self._backend: TrainBackend | None = None
        self._sender: WeightSender | None = None
        self._canary = _Canary()
        self._steps = 0  # rollout steps trained
        self._staged: tuple[Path, int] | None = None  # directory and steps of the last staged save
        self._profiler = RankProfiler(None, rank)
        self._once = CallOnce()

    def perform[Result](self, call: CallId, method: Callable[..., Result], *arguments: object) -> Result:
        """Call ``method``, a function of this class; if ``call`` was executed before, return its answer."""
        return self._once.run(call, lambda: method(self, *arguments))

    @ray.method(concurrency_group="pings")
    def ping(self) -> None:
        """Show that the process can be reached."""

    def listen(self) -> tuple[str, int]:
        """Open the rendezvous of all ranks, on rank 0."""
        from miles_async.runtime.network.rendezvous import open_store

        address = self._network.address()
        self._store = open_store(address, self._network.ports)
        return address, self._store.port

    def initialize(
        self,
        address: str,
        port: int,
        backend: BackendFactory,
        sender: SenderFactory,
        senders: int,
        threads: int | None,
        profiling: Profiling | None = None,
    ) -> RankInfo:
        """Build the backend; return once all ranks have. The first rank of each of the first ``senders`` pipeline
        stages sends weights.
        """
        import torch
        import torch.distributed as dist

        if threads is not None:
            torch.set_num_threads(threads)
        os.environ.update(self._network.variables())  # of this node, before the first process group
        if self._store is None:
            self._store = dist.TCPStore(address, port, is_master=False)
        self._profiler = RankProfiler(profiling, self._rank)
        # Ray shows each actor its own GPU only, as device 0.
        self._backend = backend(rank=self._rank, world_size=self._world_size, local_rank=0, store=self._store)
        stage = self._backend.pipeline_stage
        if stage is not None and stage < senders:
            self._sender = sender(self._network.address(), sender=stage, senders=senders)
        gc.collect()  # frozen garbage would stay: megatron drops a first offloaded optimizer, with all its weights
        gc.freeze()  # exclude torch, megatron and the model from later collections
        return RankInfo(
            rank=self._rank,
            data_parallel_rank=self._backend.data_parallel_rank,
            sender=stage if self._sender is not None else None,
            pid=os.getpid(),
            changes_settings=isinstance(self._backend, ChangesSettings),
        )

    def train(self, shard: TrainShard) -> tuple[dict[str, float], Sequence[TokenScores], RankTimes]:
        """Return metrics over all ranks, the scores of the branches of this shard that are shown, and what the step
        took here.
        """
        backend, began, started = self._ready, time.time(), time.perf_counter()
        with self._profiler.step(self._steps + 1):
            metrics = backend.train(shard)
        self._steps += 1
        scores = backend.token_scores() if isinstance(backend, ScoresTokens) else ()
        whole = {"training": time.perf_counter() - started}
        return metrics, scores, RankTimes(began, backend.part_seconds() if isinstance(backend, TimesParts) else whole)

    def change(self, values: Mapping[str, SettingValue]) -> None:
        """Apply changed settings to later steps; a no-op if the backend cannot change any."""
        if isinstance(self._ready, ChangesSettings):
            self._ready.change(values)

    def copy_weights(self, version: int, canary_tokens: tuple[int, ...]) -> None:
        """Copy a sending rank's share of the weights to host memory, and score the canary."""
        started = time.perf_counter()
        backend = self._ready
        tensors = backend.export_weights()
        if self._sender is not None:
            self._sender.copy(version, tensors)
        for _ in tensors:  # the export is collective: every rank iterates to its end
            pass
        # Engines score prompts at temperature 1, whatever they sample at.
        logprobs = tuple(backend.logprobs([canary_tokens], temperature=1.0)[0]) if canary_tokens else ()
        self._canary = _Canary(canary_tokens, logprobs, self._canary.logprobs, time.perf_counter() - started)

    def stage_weights(self, version: int) -> StagedWeights:
        """Write the copied weights to files. Runs on sending ranks, in the weights' thread."""
        assert self._sender is not None, "only sending ranks have a sender"
        canary = self._canary  # training's thread makes the next one
        started = time.perf_counter()
        staged = self._sender.stage(version)
        return msgspec.structs.replace(
            staged,
            canary_tokens=canary.tokens,
            canary_logprobs=canary.logprobs,
            previous_canary_logprobs=canary.before,
            copy_seconds=canary.copy_seconds,
            prepare_seconds=canary.copy_seconds + time.perf_counter() - started,
        )

    def location(self) -> tuple[str, str]:
        """ID of this node, and the GPU that Ray assigned to this process."""
        [gpu] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return ray.get_runtime_context().get_node_id(), gpu

    def offload(self) -> None:
        self._leaving.offload()

    def onload(self) -> None:
        self._leaving.onload()

    def save(self, directory: Path) -> dict[str, str]:
        """Return the digests of the written files that the backend has."""
        digests = dict(self._ready.save(directory) or {})
        return digests | self._save_position(directory, self._steps) if self._rank == 0 else digests

    def stage_save(self, directory: Path) -> dict[str, str]:
        """Stage a save; if the backend cannot write in the background, save, and return the digests."""
        if not isinstance(self._ready, SavesInBackground):
            return self.save(directory)
        self._ready.stage_save(directory)
        self._staged = directory, self._steps
        return {}

    def write_save(self) -> bytes:
        """Runs in the save thread."""
        return self._ready.write_save() if isinstance(self._ready, SavesInBackground) else b""

    def finish_save(self, parts: Sequence[bytes]) -> dict[str, str]:
        """Runs on rank 0, in the save thread. Returns the digests of all ranks' files."""
        if not isinstance(self._ready, SavesInBackground):
            return {}
        assert self._staged is not None, "stage_save() comes first"
        return {**(self._ready.finish_save(parts) or {}), **self._save_position(*self._staged)}

    def _save_position(self, directory: Path, steps: int) -> dict[str, str]:
        try:
            return {POSITION_FILE: write_digested(directory / POSITION_FILE, msgspec.json.encode({"step": steps}))}
        except OSError as error:
            raise CheckpointError(f"cannot write {directory}: {error}") from error

    def save_hf(self, directory: Path) -> None:
        self._ready.save_hf(directory)

    def load(self, directory: Path, step: int) -> None:
        self._ready.load(directory)
        self._steps = step
        self._canary = _Canary()

    def read_pieces(self, directory: Path, pieces: Sequence[Piece]) -> list[bytes]:
        """Digests of this rank's share of a checkpoint's files."""
        try:
            return read_pieces(directory, pieces)
        except OSError as error:
            raise CheckpointError(f"cannot read {directory}: {error}") from error

    def call_sender[Result](self, method: Callable[..., Result], arguments: Sequence[object]) -> Result:
        """Call this rank's sender. ``method``: of its protocol."""
        assert self._sender is not None, "only sending ranks have a sender"
        implementation: Callable[..., Result] = getattr(self._sender, method.__name__)
        return implementation(*arguments)

    @property
    def _leaving(self) -> LeavesDevice:
        if not isinstance(self._ready, LeavesDevice):
            raise ConfigurationError(
                f"--colocate: expected a training backend (--train-backend) with offload() and onload(), found "
                f"{type(self._ready).__name__}: leave --colocate out"
            )
        return self._ready

    @property
    def _ready(self) -> TrainBackend:
        assert self._backend is not None, "initialize() comes first"
        return self._backend
