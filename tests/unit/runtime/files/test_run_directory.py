"""A run has its directory to itself, and moves nothing aside but the directory of an earlier run."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_async.errors import ConfigurationError, RunDirectoryError
from miles_async.runtime.files import run_directory
from miles_async.runtime.files.run_directory import (
    CODE_DIRECTORY,
    CONSOLE_FILE,
    carry_over,
    check_run_directory,
    claimed,
    find_run,
    move_aside,
)
from miles_async.runtime.processes.run_process import KEEPER, MARK, RUN_FILE, note_run_process, read_run_process

HOLDER = """
import sys, time
from pathlib import Path
from miles_async.runtime.files.run_directory import claimed

with claimed(Path(sys.argv[1]), Path("control")):
    (Path(sys.argv[1]) / "metrics.jsonl").write_text("mine")
    print("claimed", flush=True)
    time.sleep(300)
"""


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "")  # restored at the end: this process is no run


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process whose run has ``tmp_path / "run"``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def claim(directory: Path) -> None:
    with claimed(directory, Path("control")):
        assert sorted(path.name for path in directory.iterdir()) == ["logs", RUN_FILE]
        assert read_run_process(directory).pid == os.getpid()


def test_a_directory_that_a_run_has_is_refused_and_left_alone(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for attempt in (check_run_directory, claim):
        with pytest.raises(ConfigurationError, match="is under way") as refusal:
            attempt(tmp_path / "run")
    assert f"process {holder.pid} on " in str(refusal.value)
    assert "metrics.jsonl" in str(refusal.value)  # the command of that process
    assert f"miles-async stop {tmp_path / 'run'}" in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "mine"


def test_a_run_that_was_killed_holds_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    check_run_directory(tmp_path / "run")
    claim(tmp_path / "run")
    (aside,) = tmp_path.glob("run.2*")
    assert (aside / "metrics.jsonl").read_text() == "mine"


def test_without_locks_the_process_in_the_file_decides(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigurationError, match=f"process {holder.pid} "):
        check_run_directory(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    claim(tmp_path / "run")


def test_runs_one_after_the_other_are_all_kept(tmp_path: Path) -> None:
    for _ in range(4):
        claim(tmp_path / "runs" / "latest")
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_a_claim_ends_with_its_run(tmp_path: Path) -> None:
    with claimed(tmp_path / "run", Path("control")), pytest.raises(ConfigurationError, match=f"process {os.getpid()} "):
        check_run_directory(tmp_path / "run")
    check_run_directory(tmp_path / "run")


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda run: (run / RUN_FILE).unlink(), lambda run: run.rename("gone")])
async def test_a_run_notices_that_its_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(run_directory, "_WATCH_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    with claimed(tmp_path / "run", Path("control")) as claim:
        watch = asyncio.create_task(claim.until_lost())
        await asyncio.sleep(0.1)
        assert not watch.done()
        lose(tmp_path / "run")
        with pytest.raises(RunDirectoryError, match=r"--run-dir .*/run was removed, moved or replaced .* --load"):
            async with asyncio.timeout(50):
                await watch


def test_a_directory_that_no_run_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(precious)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    os.symlink(precious, tmp_path / "elsewhere" / "link")
    for directory, message in (
        (precious, "working directory"),
        (Path("."), "working directory"),
        (Path("/"), "working directory"),
        (tmp_path / "elsewhere" / "link", "working directory"),
        (tmp_path / "home", "home directory"),
    ):
        for attempt in (check_run_directory, claim):
            with pytest.raises(ConfigurationError, match=message):
                attempt(directory)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for attempt in (check_run_directory, claim):
        with pytest.raises(ConfigurationError, match=r"found files and no run\.json"):
            attempt(precious)
    assert (precious / "thesis.tex").read_text() == "x"
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]


def test_code_and_output_that_were_carried_there_stay_and_an_earlier_starts_are_carried_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / CODE_DIRECTORY).mkdir(parents=True)
    (run / CODE_DIRECTORY / "hook.py").write_text("x")
    (run / CONSOLE_FILE).write_text("checking")
    with claimed(run, Path("control")):
        pass
    assert (run / CODE_DIRECTORY / "hook.py").read_text() == "x"
    earlier = move_aside(run)
    carry_over(earlier, run)
    assert {path.name for path in run.iterdir()} == {CODE_DIRECTORY, CONSOLE_FILE}
    assert (run / CODE_DIRECTORY / "hook.py").read_text() == "x"
    assert not (earlier / CONSOLE_FILE).exists()
    check_run_directory(run)


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    claim(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("number", "same"), [(errno.ESTALE, False), (errno.EIO, True), (errno.ETIMEDOUT, True)])
def test_a_network_disk_that_fails_for_a_moment_is_not_a_lost_directory(
    number: int, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "stat", fails)
    with (tmp_path / "file").open("w") as file:
        assert run_directory._is_same_file(file.fileno(), tmp_path / "file") is same


def test_between_two_lives_the_run_is_where_its_files_were_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside, over, other = (tmp_path / f"run.{name}" for name in ("20261129-120000", "20261129-110000-2", "old"))
    for directory, keeper in ((over, 0), (other, os.getppid()), (aside, os.getppid())):
        monkeypatch.setenv(KEEPER, str(keeper))
        directory.mkdir()
        note_run_process(directory, Path("control"))
    assert find_run(tmp_path / "run") == (aside, read_run_process(aside))
    shutil.rmtree(aside)
    with pytest.raises(ConfigurationError, match="there is no directory"):
        find_run(tmp_path / "run")
