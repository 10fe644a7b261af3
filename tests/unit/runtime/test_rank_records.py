"""Records over gloo's real process groups, and that torch's own collectives of objects are refused."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles_async.errors import CheckpointError, ConfigurationError, MilesAsyncError
from miles_async.runtime.rank_records import broadcast_record, gather_records, gather_values
from miles_async.types import Int32

RANKS = 3
SECONDS = 120  # importing torch included
FORK = multiprocessing.get_context("forkserver")  # torch is imported once for all ranks
FORK.set_forkserver_preload(["miles_async.runtime.rank_records", "miles_async.backends.megatron.distributed"])


class Found(msgspec.Struct, frozen=True):
    """Differs in length from rank to rank."""

    rank: int
    names: set[str]
    tokens: Int32


def found_by(rank: int) -> Found:
    return Found(rank, {f"t{number}" for number in range(rank)}, np.arange(100 * rank, dtype=np.int32))


def refused(rank: int) -> int:
    """Fails on two ranks, differently."""
    if rank:
        raise (CheckpointError if rank == 1 else ConfigurationError)(f"disk {rank} is full")
    return rank


def exchange(rank: int, store: str, answers: Any) -> None:
    from miles_async.backends.megatron.distributed import together

    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    part = dist.new_group([1, 2])
    gathered = gather_records(found_by(rank), Found)
    assert [record.rank for record in gathered] == [0, 1, 2]
    assert [record.names for record in gathered] == [found_by(each).names for each in range(RANKS)]
    assert [record.tokens.tolist() for record in gathered] == [found_by(each).tokens.tolist() for each in range(RANKS)]
    assert [each.tolist() for each in gather_values(torch.arange(rank))] == [[], [0], [0, 1]]
    assert broadcast_record(found_by(rank), Found, source=1).rank == 1
    if rank:
        assert gather_records(f"rank {rank}", str, part) == ["rank 1", "rank 2"]
        assert broadcast_record([rank] * rank, list[int], source=1, group=part) == [2, 2]
    with pytest.raises(msgspec.ValidationError):
        gather_records("text", int)
    assert together(lambda: 10 * rank) == 10 * rank
    with pytest.raises(MilesAsyncError) as failure:
        together(lambda: refused(rank))
    answers.put((rank, type(failure.value), str(failure.value)))
    dist.destroy_process_group()


def test_every_rank_gets_the_records_of_all_in_their_order_and_the_first_failure_of_any() -> None:
    with tempfile.TemporaryDirectory() as directory:
        answers = FORK.Queue()
        processes = [
            FORK.Process(target=exchange, args=(rank, f"{directory}/store", answers), daemon=True)
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        assert [process.exitcode for process in processes] == [0] * RANKS
        told = sorted(answers.get(timeout=SECONDS) for _ in range(RANKS))
    assert told == [(rank, CheckpointError, "disk 1 is full") for rank in range(RANKS)]


def test_ruff_refuses_all_of_torchs_collectives_of_objects() -> None:
    calls = [name for name in dir(dist) if "object" in name]
    assert "all_gather_object" in calls
    ruff = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename=miles_async/new.py", "-"],
        input="import torch.distributed as dist\n\n" + "".join(f"dist.{call}()\n" for call in calls),
        capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False, timeout=60,
    )  # fmt: skip
    assert [call for call in calls if f"`torch.distributed.{call}` is banned" not in ruff.stdout] == []
