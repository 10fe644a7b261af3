"""Profiles of a training step: of the right step and rank, and never an end of the run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from miles_async.trainer.profiling import Profiling, RankProfiler

STEP = 2


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "profiles"


def profiling(directory: Path, *, memory: bool = False) -> Profiling:
    return Profiling(directory=directory, step=STEP, ranks=frozenset({1}), memory=memory)


def train(profiler: RankProfiler, steps: int = 3) -> None:
    """Step n multiplies matrices of n rows."""
    for number in range(1, steps + 1):
        with profiler.step(number):
            torch.mm(torch.ones(number, 5), torch.ones(5, 7))


def test_one_step_of_the_chosen_rank_is_profiled(directory: Path) -> None:
    train(RankProfiler(profiling(directory), rank=1))
    [path] = directory.iterdir()
    assert path.name == "step-2.rank-1.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    products = [event["args"]["Input Dims"] for event in events if event["name"] == "aten::mm"]
    assert products == [[[STEP, 5], [5, 7]]]


@pytest.mark.parametrize("rank", [0, 2])
def test_other_ranks_write_nothing(directory: Path, rank: int) -> None:
    train(RankProfiler(profiling(directory), rank=rank))
    assert not directory.exists()


def test_without_a_profile_nothing_is_written(tmp_path: Path) -> None:
    train(RankProfiler(None, rank=0))
    assert not [*tmp_path.iterdir()]


def test_an_error_of_the_step_is_the_steps_own(directory: Path) -> None:
    profiler = RankProfiler(profiling(directory), rank=1)
    with pytest.raises(ZeroDivisionError), profiler.step(STEP):
        raise ZeroDivisionError
    assert not directory.exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_step(directory: Path) -> None:
    directory.parent.mkdir()
    directory.write_text("a file where the directory should be")
    train(RankProfiler(profiling(directory), rank=1))
    assert directory.is_file()


class Recorded:
    """Stands for ``torch.cuda.memory``, which needs a GPU: tests/gpu has the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, object]] = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: self.calls.append(options))
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"snapshot"))

    @property
    def records(self) -> bool:
        return bool(self.calls) and self.calls[-1].get("enabled", "all") is not None


def test_a_run_resumed_after_the_step_writes_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    profiler = RankProfiler(profiling(directory, memory=True), rank=1)
    for number in (STEP + 1, STEP + 2):
        with profiler.step(number):
            assert not recorded.records
    assert recorded.calls[1:] == [{"enabled": None}], "the history ends once"
    assert not directory.exists()


def test_memory_is_recorded_from_the_start_to_the_end_of_the_step(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    profiler = RankProfiler(profiling(directory, memory=True), rank=1)
    with profiler.step(1):
        assert recorded.records
    assert not directory.exists()
    train(profiler)
    assert {path.name for path in directory.iterdir()} == {"step-2.rank-1.json.gz", "step-2.rank-1.memory.pickle"}
    assert not recorded.records


@pytest.mark.parametrize("step", [1, STEP])
def test_memory_is_written_when_it_runs_out(directory: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    recorded = Recorded(monkeypatch)
    profiler = RankProfiler(profiling(directory, memory=True), rank=1)
    with pytest.raises(torch.OutOfMemoryError), profiler.step(step):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert [path.name for path in directory.iterdir()] == [f"step-{step}.rank-1.memory.pickle"]
    assert not recorded.records


def test_memory_of_other_ranks_is_not_recorded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    train(RankProfiler(profiling(directory, memory=True), rank=0))
    assert recorded.calls == []
