"""Which directories are opened as runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from miles_async.cli import main
from miles_async.errors import ConfigurationError
from miles_async.runtime.files.run_directory import check_directory
from miles_async.watch.run import open_runs
from tests.unit.watch.run_files import write_finished_run


def test_a_directory_of_runs_stands_for_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_finished_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "data").mkdir()
    assert sorted(run.name for run in open_runs([tmp_path / "runs"])) == ["a", "b"]
    assert len(open_runs([tmp_path / "runs", tmp_path / "runs" / "a"])) == 2


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    first, second = (write_finished_run(tmp_path / parent / "run") for parent in ("x", "y"))
    assert [run.name for run in open_runs([first, second])] == [str(first), str(second)]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected a run directory"):
        open_runs([tmp_path])
    with pytest.raises(ConfigurationError, match="there is no directory"):
        open_runs([tmp_path / "absent"])


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that this user may not search, although root may."""
    directory, stat = tmp_path / "runs" / "locked", os.stat
    directory.mkdir(parents=True)

    def refuse(path: str | Path, **options: Any) -> os.stat_result:
        if Path(path).is_relative_to(directory) and Path(path) != directory:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    return directory


def test_a_directory_that_cannot_be_read_is_passed_over_among_others(locked: Path) -> None:
    write_finished_run(locked.parent / "mine")
    assert [run.name for run in open_runs([locked.parent])] == ["mine"]
    with pytest.raises(ConfigurationError, match="Permission denied"):
        check_directory(locked / "run")


@pytest.mark.parametrize("command", ["report", "ledger", "samples", "watch"])
def test_a_command_for_a_directory_that_cannot_be_read_says_so(
    locked: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(locked)]) == 2
    assert main([command, str(locked / "run")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert ["Permission denied: '" in line and str(locked) in line for line in lines] == [True, True]


def test_a_file_is_in_the_directory(tmp_path: Path) -> None:
    (run,) = open_runs([write_finished_run(tmp_path / "run")])
    assert run.file("logs", "driver.log") is not None
    for parts in (("..", "run", "..", "x"), ("/etc/passwd",), ("logs",), ("absent",), ("a" * 5000,), ("\0",)):
        assert run.file(*parts) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "a = " + "[" * 5_000 + "]" * 5_000], ids=range(5))
def test_files_that_cannot_be_read_are_as_if_absent(tmp_path: Path, text: str) -> None:
    (run,) = open_runs([write_finished_run(tmp_path / "run")])
    for name in ("summary.json", "config.toml", "engines.json", "ranks.json"):
        (tmp_path / "run" / name).write_text(text)
    assert (run.summary(), run.flags(), run.engines(), run.ranks()) == ({}, {}, None, None)
