"""The history of GPU memory that ``--record-memory-history`` writes: allocations of the step, with their places."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from miles_async.trainer.profiling import Profiling, RankProfiler

MEGABYTE = 2**20


def profiler(directory: Path) -> RankProfiler:
    return RankProfiler(Profiling(directory=directory, step=2, ranks=frozenset({0}), memory=True), rank=0)


def allocated(path: Path) -> list[dict[str, object]]:
    """Allocations of 3 MiB and more in a snapshot, with the functions that made them."""
    [trace] = [events for events in pickle.loads(path.read_bytes())["device_traces"] if events]
    return [event for event in trace if event["action"] == "alloc" and event["size"] >= 3 * MEGABYTE]


def allocate(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MEGABYTE, dtype=torch.uint8, device="cuda")


def test_a_step_leaves_its_kernels_and_all_allocations_until_then(tmp_path: Path) -> None:
    found = profiler(tmp_path)
    kept = [allocate(3)]
    for step, megabytes in enumerate((4, 5, 6), start=1):
        with found.step(step):
            kept.append(allocate(megabytes))
    events = allocated(tmp_path / "step-2.rank-0.memory.pickle")
    assert [event["size"] for event in events] == [size * MEGABYTE for size in (3, 4, 5)]
    assert all("allocate" in {frame["name"] for frame in event["frames"]} for event in events)  # type: ignore[attr-defined]
    profile = json.loads(gzip.decompress((tmp_path / "step-2.rank-0.json.gz").read_bytes()))
    assert any(event.get("cat") == "kernel" for event in profile["traceEvents"])


def test_running_out_of_memory_leaves_the_history(tmp_path: Path) -> None:
    found = profiler(tmp_path)
    allocate(3)
    with pytest.raises(torch.OutOfMemoryError), found.step(1):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert [event["size"] for event in allocated(tmp_path / "step-1.rank-0.memory.pickle")] == [3 * MEGABYTE]
