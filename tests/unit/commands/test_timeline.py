"""``miles-async timeline``: which run, which part of it, and where the file goes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from miles_async.commands.timeline import timeline
from miles_async.errors import ConfigurationError, LedgerError
from tests.unit.watch.timeline.trace_files import read_trace, recorded_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run")


def test_the_file_is_written_into_the_run_directory(run_dir: Path) -> None:
    said = timeline([str(run_dir)])
    assert said.startswith(f"wrote {run_dir / 'timeline.json.gz'} (0.0 MB)")
    assert len(read_trace(run_dir / "timeline.json.gz").spans("trainer", "steps", "step")) == 6


def test_a_part_of_the_run_and_another_place(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.json.gz"
    timeline([str(run_dir), "--last-steps", "1", "--attempts", "3", "--output", str(path)])
    assert [step.name for step in read_trace(path).spans("trainer", "steps", "step")] == ["step 6"]


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5"])
@pytest.mark.parametrize("flag", ["--last-steps", "--attempts"])
def test_numbers_are_checked(run_dir: Path, flag: str, word: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag}: expected a whole number of at least 1, found '{word}'"):
        timeline([str(run_dir), f"{flag}={word}"])


def test_a_directory_of_several_runs_is_refused(run_dir: Path) -> None:
    recorded_run(run_dir.parent / "other")
    with pytest.raises(ConfigurationError, match="expected one run directory, found 2 in it"):
        timeline([str(run_dir.parent)])


def test_a_file_that_cannot_be_written(run_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        timeline([str(run_dir), "--output", "/nowhere/x.gz"])


def test_a_damaged_ledger_is_named_and_leaves_no_file(run_dir: Path) -> None:
    with sqlite3.connect(run_dir / "ledger.sqlite") as connection:
        connection.execute("UPDATE attempts SET engines = '[' WHERE attempt_id = 3")
    with pytest.raises(LedgerError, match="cannot read this ledger: attempt 3: "):
        timeline([str(run_dir)])
    assert not [path for path in run_dir.iterdir() if path.name.startswith("timeline")]
