"""Profiles of one training step on some ranks: PyTorch's profiler, and its history of the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

MEMORY_EVENTS = 100_000  # allocations and frees that PyTorch keeps, the newest; each is some KB of the file


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiling:
    directory: Path  # made with the first file
    step: int  # rollout step, from 1
    ranks: frozenset[int]
    memory: bool  # whether the history of GPU memory is recorded, from the start of the rank


class RankProfiler:
    """The profiles of one rank. A profile that cannot be written is a warning: the run continues."""

    def __init__(self, profiling: Profiling | None, rank: int) -> None:
        """Start the memory history before the model is built. ``profiling``: None: no profiles."""
        self._profiling = profiling if profiling is not None and rank in profiling.ranks else None
        self._rank = rank
        self._remembers = self._profiling is not None and self._profiling.memory
        if self._remembers:
            import torch

            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MEMORY_EVENTS)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if it is the chosen step. If an earlier one runs out of memory, write its history."""
        if self._profiling is None or number > self._profiling.step:
            self._forget()  # a run that was resumed after the step
            yield
            return
        import torch

        try:
            if number == self._profiling.step:
                yield from self._profiled(self._profiling)
            else:
                yield
        except torch.OutOfMemoryError:
            self._write_memory(self._profiling, number)
            raise

    def _profiled(self, profiling: Profiling) -> Iterator[None]:
        from torch.profiler import profile

        with profile(record_shapes=True) as found:  # of the processor, and of a GPU if there is one
            yield
        self._write(profiling, f"step-{profiling.step}.rank-{self._rank}.json.gz", found.export_chrome_trace)
        self._write_memory(profiling, profiling.step)

    def _write_memory(self, profiling: Profiling, step: int) -> None:
        """Write the history so far, and end it."""
        if not self._remembers:
            return
        import torch

        name = f"step-{step}.rank-{self._rank}.memory.pickle"
        self._write(profiling, name, torch.cuda.memory._dump_snapshot)
        self._forget()

    def _forget(self) -> None:
        """End the history of memory, which slows down every allocation."""
        if not self._remembers:
            return
        import torch

        self._remembers = False
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiling: Profiling, name: str, write: Callable[[str], object]) -> None:
        path = profiling.directory / name
        try:
            profiling.directory.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except (OSError, RuntimeError) as error:  # a disk that is full or gone; PyTorch's own
            log.warning("a profile cannot be written; the run continues", file=str(path), error=repr(error))
