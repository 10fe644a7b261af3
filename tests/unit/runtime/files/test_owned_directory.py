"""Temporary files on a scale that fills disks: gone with their owner, however it ends, and never before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_async.runtime.files.owned_directory import PREFIX, OwnedDirectory, sweep, sweep_temporary

OWNER = """
import sys, time
from pathlib import Path
from miles_async.runtime.files.owned_directory import OwnedDirectory

directory = OwnedDirectory(Path(sys.argv[1]))
Path(sys.argv[1], "segment").touch()
directory.owns([Path(sys.argv[1], "segment")])
(directory.path / "large").write_text("x")
print(directory.path, flush=True)
time.sleep(60)
"""


def test_it_is_removed_with_its_content(tmp_path: Path) -> None:
    directory = OwnedDirectory(tmp_path / "made" / "too")
    (directory.path / "sub").mkdir()
    (directory.path / "sub" / "file").write_text("x")
    directory.remove()
    directory.remove()
    assert list((tmp_path / "made" / "too").iterdir()) == []


def test_files_elsewhere_go_with_it_unless_they_are_others_by_then(tmp_path: Path) -> None:
    segments = [tmp_path / name for name in ("first", "second", "third")]
    for segment in segments:
        segment.touch()
    directory = OwnedDirectory(tmp_path / "tmp")
    directory.owns(segments[:1])
    directory.owns(segments)
    segments[1].unlink()
    other = tmp_path / "other"
    other.write_text("somebody else's")
    other.rename(segments[2])
    directory.remove()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["third"]


def test_files_that_another_user_names_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.touch()
    directory = OwnedDirectory(tmp_path / "tmp")
    directory.owns([mine])
    monkeypatch.setattr("os.getuid", lambda: directory.path.stat().st_uid + 1)
    directory.remove()
    assert mine.exists()


def test_what_killed_runs_left_goes_from_all_places_of_temporary_files_and_a_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("memory", "disk", "named")]
    left = [place / f"{PREFIX}dead" for place in places]
    for directory in left:
        directory.mkdir(parents=True)
        (directory / ".owner").touch()
    monkeypatch.setattr("miles_async.runtime.files.owned_directory._MEMORY", places[0])
    monkeypatch.setattr("tempfile.tempdir", str(places[1]))
    sweep_temporary()
    assert [directory.exists() for directory in left] == [False, False, True]
    sweep_temporary(places[2])
    assert not left[2].exists()


def test_files_of_a_killed_owner_are_removed_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    (tmp_path / "somebody-elses").mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    left = Path(owner.stdout.readline().strip())
    mine = OwnedDirectory(tmp_path)
    assert (left / "large").exists()
    assert (tmp_path / "segment").exists()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    sweep(tmp_path)
    assert not left.exists()
    assert not (tmp_path / "segment").exists()
    assert mine.path.is_dir()
    assert (tmp_path / "somebody-elses").is_dir()
    mine.remove()
