"""metrics.jsonl as columns: it reads on, merges steps, and keeps every peak when it leaves values out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.watch.metrics_table import MetricsTable, Series, down_sampled, stretch_means, within
from tests.unit.watch.run_files import write_finished_run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def table(path: Path) -> MetricsTable:
    found = MetricsTable(path)
    found.refresh()
    return found


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    run_dir = write_finished_run(tmp_path / "run")
    found = table(run_dir / FILE_NAME)
    rows = read_metrics(run_dir / FILE_NAME)
    assert found.names == sorted({name for row in rows for name in row} - {"step", "time"})
    for name in found.names:
        series = found.series(name)
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert list(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == expected


def test_only_what_was_added_is_read(path: Path) -> None:
    path.write_text('{"kind": "step", "step": 1, "time": 5.0, "a": 1.0}\n{"kind": "step", "step": 2, "a"')
    found = table(path)
    assert found.last("a") == 1.0
    assert found.notes == [f"{FILE_NAME}: the last line is half-written and was skipped"]
    found.refresh()
    assert found.series("a").values.tolist() == [1.0]
    with path.open("a") as file:
        file.write(": 2.0}\n")
    found.refresh()
    assert found.series("a").values.tolist() == [1.0, 2.0]
    assert found.notes == []


def test_a_resumed_run_overwrites_the_steps_that_it_repeats(path: Path) -> None:
    steps = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)]
    path.write_text("".join(f'{{"kind": "step", "step": {step}, "a": {value}}}\n' for step, value in steps))
    series = table(path).series("a")
    assert series.steps.tolist() == [1, 2, 3]
    assert series.values.tolist() == [1.0, 20.0, 3.0]


def test_unreadable_lines_are_counted(path: Path) -> None:
    path.write_bytes(b'\xff\xfe\n[1]\n{"step": "x"}\n{"kind": "step", "step": 1, "a": null, "b": 2, "c": "text"}\n')
    found = table(path)
    assert found.names == ["a", "b"]
    assert found.last("a") is None
    assert found.notes == [f"{FILE_NAME}: 3 unreadable lines were skipped"]


def test_a_replaced_file_is_read_from_its_start(path: Path) -> None:
    path.write_text('{"kind": "step", "step": 7, "a": 1.0}\n')
    found = table(path)
    path.unlink()
    found.refresh()
    assert found.names == []
    path.write_text('{"kind": "step", "step": 1, "b": 1.0}\n')
    found.refresh()
    assert found.names == ["b"]


def test_down_sampling_keeps_peaks_and_ends() -> None:
    steps = np.arange(10_000)
    values = np.sin(steps / 50.0)
    values[4_321], values[8_765] = 100.0, -100.0
    found = down_sampled(Series(steps, values), 200)
    assert len(found.steps) <= 200
    assert {0, 4_321, 8_765, 9_999} <= set(found.steps.tolist())
    assert (np.diff(found.steps) > 0).all()
    assert (found.values == values[found.steps]).all()


def test_means_of_stretches_are_of_all_values() -> None:
    series = Series(np.arange(1, 1_001), np.where(np.arange(1_000) % 20, 1.0, 20.0))
    found = stretch_means(series, 100)
    assert found is not None
    assert found.steps.tolist() == [*range(20, 1_001, 20)]
    assert found.values == pytest.approx(np.full(50, 1.95))
    assert stretch_means(within(series, 101, 200), 100) is None  # down_sampled has them all


def test_a_range_is_cut_before_values_are_left_out() -> None:
    series = Series(np.arange(1_000), np.arange(1_000.0))
    found = down_sampled(within(series, 100, 120), 50)
    assert found.steps.tolist() == [*range(100, 121)]
