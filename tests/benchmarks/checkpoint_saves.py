"""How long the trainer waits for a checkpoint, and what steps cost while one is written: with and without
``--async-save``, by turns on the same ranks and disk, in one run. fp32, one core per rank at best.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.report import Row

if TYPE_CHECKING:
    import torch.distributed as dist

WIDTHS = (512, 1024)
RANKS = (1, 2)  # data-parallel
SAVES = 3  # of each kind, after one that is not counted; the median is shown
STEPS = 3  # for the mean of a step alone


def rows() -> Iterator[Row]:
    """By width of the model and number of ranks."""
    from tests.integration.rank_processes import run_ranks
    from tests.integration.tiny_models import save_tiny_qwen3

    with tempfile.TemporaryDirectory() as scratch:
        for width in WIDTHS:
            model = save_tiny_qwen3(
                Path(scratch) / f"model-{width}", tied=True, hidden_size=width, intermediate_size=4 * width
            )
            for ranks in RANKS:
                yield run_ranks(ranks, _measure, model, Path(scratch) / f"{width}-{ranks}", timeout=500)[0]


def _measure(rank: int, world_size: int, store: dist.Store, model: Path, scratch: Path) -> Row:
    import numpy as np
    import torch

    from miles_async.backends.megatron.distributed import together
    from tests.integration.megatron_scenario import Layout, make_backend
    from tests.integration.toy_batches import to_shards, toy_samples

    backend = make_backend(rank, world_size, store, model, Layout(world_size))
    shard = to_shards([toy_samples(8)], dp_size=world_size, micro_batches=1)[rank]
    parts: list[bytes] = []
    seconds: dict[str, list[float]] = {"sync": [], "async": [], "write": [], "step": [], "step_meanwhile": []}

    def timed(name: str, work: Callable[..., object], *arguments: object) -> None:
        torch.distributed.barrier()
        started = time.perf_counter()
        work(*arguments)
        seconds[name].append(time.perf_counter() - started)

    def write() -> None:
        started = time.perf_counter()
        parts.append(backend.write_save())
        seconds["write"].append(time.perf_counter() - started)

    def save_meanwhile(directory: Path) -> None:
        timed("async", backend.stage_save, directory)
        writer = threading.Thread(target=write)
        writer.start()
        timed("step_meanwhile", backend.train, shard)
        writer.join()
        of_ranks = together(lambda: parts[-1])
        together(lambda: backend.finish_save(of_ranks) if rank == 0 else None)

    for number in range(1 + SAVES):
        for _ in range(STEPS):
            timed("step", backend.train, shard)
        timed("sync", backend.save, scratch / f"sync-{number}")
        save_meanwhile(scratch / f"async-{number}")
        size = sum(file.stat().st_size for file in (scratch / f"async-{number}").iterdir())
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(scratch)
            scratch.mkdir()
        torch.distributed.barrier()
    backend.close()
    median = {name: float(np.median(of_name[1:])) for name, of_name in seconds.items()}
    return {
        "ranks": world_size,
        "checkpoint_mb": round(size / 1e6),
        "blocked_sync_s": round(median["sync"], 2),
        "blocked_async_s": round(median["async"], 2),
        "ratio": round(median["async"] / median["sync"], 2),
        "written_in_s": round(median["write"], 2),
        "step_s": round(median["step"], 2),
        "step_meanwhile_s": round(median["step_meanwhile"], 2),
    }
