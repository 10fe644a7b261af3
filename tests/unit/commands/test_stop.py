"""``miles-async stop``: the run ends in order if it can, and nothing of it is left either way."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from miles_async.cli import main
from miles_async.runtime.files.owned_directory import PREFIX
from miles_async.runtime.files.run_directory import CONFIG_FILE
from miles_async.runtime.processes.run_process import RUN_FILE, RunProcess, read_run_process
from tests.unit.commands.command_line import printed, refused

DRIVER = """
import signal, subprocess, sys, time
from pathlib import Path
from miles_async.runtime.processes.run_process import mark_processes, note_run_process
mark_processes()
note_run_process(Path(sys.argv[1]), Path("absent"))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
if "obedient" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (child.kill() if "tidy" in sys.argv else None, sys.exit(130)))
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(child.pid, flush=True)
time.sleep(300)
"""


class Driver:
    def __init__(self, run_dir: Path, *manners: str) -> None:
        command = [sys.executable, "-c", DRIVER, str(run_dir), *manners]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.child = psutil.Process(int(self.process.stdout.readline()))

    def end(self) -> None:
        for process in (self.process, self.child):
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        self.process.wait(10)


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.end()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_run_that_ends_by_itself_is_only_asked(
    tmp_path: Path, drivers: list[Driver], capsys: pytest.CaptureFixture[str]
) -> None:
    # covers: C10
    drivers.append(driver := Driver(tmp_path, "obedient", "tidy"))
    assert main(["stop", str(tmp_path)]) == 0
    assert driver.process.wait(10) == 130
    assert not alive(driver.child)
    assert capsys.readouterr().out == f"stopping the run in {tmp_path} (process {driver.process.pid})\n"


def test_processes_that_the_driver_leaves_are_killed_wherever_they_are(
    tmp_path: Path, drivers: list[Driver], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C10
    monkeypatch.setattr("miles_async.runs.ending.LEFTOVER_SECONDS", 0.5)
    drivers.append(driver := Driver(tmp_path, "obedient"))
    drivers.append(other := Driver(tmp_path.parent))
    assert main(["stop", str(tmp_path)]) == 0
    assert not alive(driver.child)
    assert alive(other.child)
    assert f"killing what is left: {driver.child.pid}" in capsys.readouterr().out
    driver.process.wait(10)
    assert printed(capsys, "stop", str(tmp_path)) == f"the run in {tmp_path} is over\n"


def test_a_reader_that_is_gone_does_not_keep_it_from_killing(
    tmp_path: Path, drivers: list[Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``miles-async stop RUN | head -1``."""
    monkeypatch.setattr("miles_async.runs.ending.LEFTOVER_SECONDS", 0.5)
    drivers.append(driver := Driver(tmp_path, "obedient"))
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb", 0), write_through=True) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["stop", str(tmp_path)]) == 0
        monkeypatch.undo()
    assert not alive(driver.child)


def test_a_driver_that_does_not_listen_is_killed(
    tmp_path: Path, drivers: list[Driver], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C10
    monkeypatch.setattr("miles_async.runs.ending.LEFTOVER_SECONDS", 0.5)
    drivers.append(driver := Driver(tmp_path))
    assert main(["stop", str(tmp_path), "--timeout", "0.3"]) == 0
    assert driver.process.wait(10) == -9
    assert not alive(driver.child)
    assert "did not end within 0.3 s" in capsys.readouterr().out


def test_a_process_that_only_has_the_pid_of_the_driver_is_left_alone(
    tmp_path: Path, drivers: list[Driver], capsys: pytest.CaptureFixture[str]
) -> None:
    drivers.append(driver := Driver(tmp_path))
    old = msgspec.structs.replace(read_run_process(tmp_path), start_ticks=1, mark="another")
    (tmp_path / RUN_FILE).write_bytes(msgspec.json.encode(old))
    assert main(["stop", str(tmp_path)]) == 0
    assert alive(psutil.Process(driver.process.pid))
    assert "is over" in capsys.readouterr().out


def test_what_killed_ranks_staged_goes_wherever_the_run_said_it_should_be(
    tmp_path: Path, drivers: list[Driver]
) -> None:
    # covers: C10
    run_dir, named = tmp_path / "run", tmp_path / "staged"
    run_dir.mkdir()
    drivers.append(driver := Driver(run_dir, "obedient", "tidy"))
    (run_dir / CONFIG_FILE).write_text(f'[weights]\nweight-staging-dir = "{named}"\n')
    left = named / f"{PREFIX}of-a-killed-rank"
    left.mkdir(parents=True)
    (left / ".owner").touch()
    others = named / "of-the-user"
    others.mkdir()
    assert main(["stop", str(run_dir)]) == 0
    driver.process.wait(10)
    assert list(named.iterdir()) == [others]


def test_a_directory_without_a_run_of_this_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected a run directory with a run.json" in refused(capsys, "stop", str(tmp_path))
    elsewhere = RunProcess(pid=1, started=0.0, start_ticks=0, host="gpu-17", mark="x")
    (tmp_path / RUN_FILE).write_bytes(msgspec.json.encode(elsewhere))
    assert "was started on gpu-17; stop it there" in refused(capsys, "stop", str(tmp_path))


@pytest.mark.parametrize("command", ["stop", "set"])
def test_a_run_of_another_user_is_left_alone(
    command: str,
    tmp_path: Path,
    drivers: list[Driver],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drivers.append(driver := Driver(tmp_path))
    user = psutil.Process().username()
    monkeypatch.setattr("os.geteuid", lambda: 4_000_000)
    assert f"the run belongs to {user}: use this command as that user" in refused(capsys, command, str(tmp_path))
    assert alive(psutil.Process(driver.process.pid))
