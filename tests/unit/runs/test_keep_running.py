"""``--max-run-restarts``: what a fault of a machine ended goes on from its newest checkpoint, anything else ends.

# covers: A1, C10
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.checkpoints.files import checkpoint_directory
from miles_async.cli import main
from miles_async.commands.ledger import ledger
from miles_async.runs.ending import end_run
from miles_async.runs.keep_running import RunKeeper
from miles_async.runs.run import attach
from miles_async.runtime.files.run_directory import CODE_DIRECTORY, CONSOLE_FILE
from miles_async.runtime.processes.restarts import LONGEST_REASON, RunRestart, read_restarts, restarts_variable

# A life of a run: writes what a driver would, then ends as the next word of "endings" says.
LIFE = """
import json, os, signal, sys, time
from pathlib import Path
from miles_async.runtime.processes.restarts import own_restarts, write_restarts
from miles_async.runtime.processes.run_process import mark_processes, note_run_process

run_dir, save, endings, *words = sys.argv[1:]
run_dir, save, endings = Path(run_dir), Path(save), Path(endings)
ending, *rest = endings.read_text().split()
endings.write_text(" ".join(rest))
with endings.with_suffix(".lives").open("a") as lives:
    print(json.dumps(words), file=lives)
run_dir.mkdir(parents=True, exist_ok=True)
mark_processes()
note_run_process(run_dir, Path("absent"))
write_restarts(run_dir, own_restarts())
step = 10 * len(own_restarts()) + 10
if ending != "early":
    checkpoint = save / f"iter_{step:07d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "position.json").write_text(json.dumps({"run": "mine"}))
if ending == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if ending == "silent":
    sys.exit(1)
if ending == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("waiting", flush=True)
    time.sleep(600)
if ending == "wait":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    print("waiting", flush=True)
    time.sleep(600)
endings = {"done": "finished", "early": "lost", "stuck": "stalled", "stuck0": "stalled"}
summary = {"ending": endings.get(ending, ending), "error": "trainer rank 1 died: machine gone"}
summary["steps"] = 0 if ending == "stuck0" else 3
if own_restarts():
    summary["restarts"] = [str(restart) for restart in own_restarts()]
(run_dir / "summary.json").write_text(json.dumps(summary))
sys.exit(0 if ending == "done" else 1)
"""

KEEPER = """
import asyncio, sys
from pathlib import Path
from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.runs.keep_running import RunKeeper
checkpoint = CheckpointArguments(save=Path(sys.argv[2]), max_run_restarts=int(sys.argv[1]))
keeper = RunKeeper(sys.argv[4:], checkpoint, Path(sys.argv[3]))
...
sys.exit(asyncio.run(keeper.run()))
"""

# Put into KEEPER: between two lives, where a function is called, it waits for a signal.
PAUSE = """
import time
from miles_async.runs import keep_running
def pause(*_):
    print("between", flush=True)
    deadline = time.monotonic() + 10
    while keeper._interrupted is None and time.monotonic() < deadline:
        time.sleep(0.05)
keep_running.{function} = pause
"""


class Lives:
    def __init__(self, directory: Path, endings: str) -> None:
        self.run_dir, self.save = directory / "run", directory / "save"
        self._endings = directory / "endings.txt"
        self._endings.write_text(endings)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", LIFE, str(self.run_dir), str(self.save), str(self._endings)]

    def run(self, restarts: int) -> int:
        return asyncio.run(RunKeeper(self.command, self.arguments(restarts), self.run_dir).run())

    def arguments(self, restarts: int) -> CheckpointArguments:
        return CheckpointArguments(save=self.save, max_run_restarts=restarts)

    def start(self, restarts: int, patch: str = "", until: str = "waiting") -> subprocess.Popen[str]:
        """In a process of its own, for signals, which has said ``until``."""
        words = [str(restarts), str(self.save), str(self.run_dir), *self.command]
        source = KEEPER.replace("...", patch)
        keeper = subprocess.Popen(
            [sys.executable, "-c", source, *words],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also in tests under nohup
        )
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == f"{until}\n"
        return keeper

    @property
    def words(self) -> list[list[str]]:
        """What each life was told beyond the flags of the user."""
        return [json.loads(line) for line in self._endings.with_suffix(".lives").read_text().splitlines()]

    def checkpoint(self, step: int) -> str:
        return str(checkpoint_directory(self.save, step))


@pytest.mark.parametrize("ending", ["lost", "kill", "stuck"])
def test_a_run_that_lost_a_process_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ending: str
) -> None:
    lives = Lives(tmp_path, f"{ending} done")
    (lives.run_dir / CODE_DIRECTORY).mkdir(parents=True)
    (lives.run_dir / CODE_DIRECTORY / "hook.py").touch()
    (lives.run_dir / CONSOLE_FILE).write_text("which process prints does not change")
    assert lives.run(1) == 0
    assert lives.words == [[], ["--load", lives.checkpoint(10)]]
    assert (lives.run_dir / CODE_DIRECTORY / "hook.py").is_file()
    assert (lives.run_dir / CONSOLE_FILE).read_text() == "which process prints does not change"
    (restart,) = read_restarts(lives.run_dir)
    assert restart.checkpoint == lives.checkpoint(10)
    assert ("the driver was killed by SIGKILL" if ending == "kill" else "trainer rank 1 died") in restart.reason
    assert Path(restart.run_dir).name.startswith("run.2")
    assert (Path(restart.run_dir) / "run.json").is_file()
    told = capfd.readouterr().err
    assert f"restarted from {lives.checkpoint(10)} after: {restart.reason}" in told
    assert "restart 1, of 1 per hour" in told


def test_a_run_whose_terminal_is_gone_is_restarted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb", 0), write_through=True) as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert Lives(tmp_path, "lost done").run(1) == 0
        monkeypatch.undo()


def test_it_ends_when_it_was_restarted_often_enough(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lives = Lives(tmp_path, "lost kill lost done")
    assert lives.run(2) == 1
    assert lives.words == [[], ["--load", lives.checkpoint(10)], ["--load", lives.checkpoint(20)]]
    assert "2 times in 3600 s is all that --max-run-restarts allows" in capfd.readouterr().err


@pytest.mark.parametrize(("ending", "status"), [("failed", 1), ("silent", 1), ("done", 0), ("stuck0", 1)])
def test_an_ending_of_its_own_is_no_reason_to_start_again(tmp_path: Path, ending: str, status: int) -> None:
    """A run that stalls before it ever trained has reasons of its own, too."""
    lives = Lives(tmp_path, f"{ending} done")
    assert lives.run(5) == status
    assert lives.words == [[]]


def test_a_restarted_run_that_stalls_before_its_first_step_is_restarted_again(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "lost stuck0 done")
    assert lives.run(2) == 0
    assert len(lives.words) == 3


def test_a_run_lost_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """Not from a checkpoint that was in --save before, which --save-overwrite is about to replace."""
    lives = Lives(tmp_path, "early lost done")
    foreign = Path(lives.checkpoint(77))
    foreign.mkdir(parents=True)
    (foreign / "position.json").write_text('{"run": "another"}')
    assert lives.run(2) == 0
    assert lives.words == [[], [], ["--load", lives.checkpoint(20)]]
    assert str(read_restarts(lives.run_dir)[0]).startswith("restarted from where it had begun after: ")


def test_a_run_that_never_had_the_directory_is_not_judged_by_what_is_there(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "lost")
    assert lives.run(0) == 1
    refused = RunKeeper([sys.executable, "-c", "raise SystemExit(1)"], lives.arguments(3), lives.run_dir)
    assert asyncio.run(refused.run()) == 1
    assert (lives.run_dir / "summary.json").is_file()  # not moved aside for a restart


def test_what_a_lost_driver_left_is_ended_before_the_next_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.runs.ending.LEFTOVER_SECONDS", 0.5)
    lives = Lives(tmp_path, "kill done")
    orphan = tmp_path / "orphan"
    fork = f"import subprocess; Path({str(orphan)!r}).write_text(str(subprocess.Popen(['sleep', '60']).pid)); os.kill("
    monkeypatch.setattr(sys.modules[__name__], "LIFE", LIFE.replace("os.kill(", fork, 1))
    assert lives.run(1) == 0
    assert _is_gone(int(orphan.read_text()))


def test_a_run_that_has_to_be_killed_to_stop_it_is_not_started_again(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "deaf done")
    keeper = lives.start(5)
    end_run(lives.run_dir, 0.2)
    assert keeper.wait(120) == 130
    assert lives.words == [[]]


@pytest.mark.parametrize(("function", "aside"), [("end_leftovers", False), ("carry_over", True)])
def test_a_run_can_be_stopped_between_two_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, aside: bool
) -> None:
    """Before its directory is moved aside, and after it."""
    lives = Lives(tmp_path, "kill done")
    keeper = lives.start(5, PAUSE.format(function=function), until="between")
    assert lives.run_dir.exists() is not aside
    assert main(["status", str(lives.run_dir)]) == 0
    assert ": between two lives: it is being restarted\n" in capsys.readouterr().out
    attached = attach(lives.run_dir)
    assert attached.state == attached.status.state == "restarting"
    assert main(["stop", str(lives.run_dir)]) == 0
    assert capsys.readouterr().out == f"stopping the run in {lives.run_dir} (process {keeper.pid})\n"
    assert keeper.wait(60) == 130
    assert lives.words == [[]]
    assert attached.state == "over"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_ends_it_at_once_and_for_good(tmp_path: Path, number: signal.Signals) -> None:
    lives = Lives(tmp_path, "wait done")
    keeper = lives.start(5)
    keeper.send_signal(number)
    assert keeper.wait(120) == 130
    assert lives.words == [[]]


def test_ctrl_c_while_a_life_starts_is_for_that_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec

    async def interrupted(*words: str, **options: object) -> asyncio.subprocess.Process:
        process = await start(*words, **options)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.1)  # the loop hears of it before the caller has the process
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", interrupted)
    checkpoint = CheckpointArguments(save=tmp_path / "save", max_run_restarts=1)
    keeper = RunKeeper([sys.executable, "-c", "import time; time.sleep(600)"], checkpoint, tmp_path / "run")
    assert asyncio.run(asyncio.wait_for(keeper.run(), 120)) == 130


def test_a_run_dies_with_the_process_that_keeps_it(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "wait")
    keeper = lives.start(5)
    (life,) = psutil.Process(keeper.pid).children()
    keeper.kill()
    keeper.wait(60)
    deadline = time.monotonic() + 60
    while not _is_gone(life.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_ledger_tells_of_restarts(tmp_path: Path) -> None:
    from miles_async.ledger.store import LedgerStore

    lives = Lives(tmp_path, "lost done")
    lives.run(1)
    LedgerStore(lives.run_dir / "ledger.sqlite").close()
    assert "restarted from" in ledger([str(lives.run_dir)])


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_restarts_of_a_long_run_fit_into_an_environment_variable() -> None:
    restart = RunRestart(at=0.0, reason="é" * LONGEST_REASON, run_dir="/runs/" + "long/" * 40, checkpoint="/c" * 100)
    (text,) = restarts_variable([restart] * 10_000).values()
    assert len(text.encode()) < 1 << 17
    assert subprocess.run(["true"], env=restarts_variable([restart] * 10_000), check=False).returncode == 0


def test_a_run_whose_directory_cannot_be_moved_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(directory: Path) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("miles_async.runs.keep_running.move_aside", refuse)
    lives = Lives(tmp_path, "lost done")
    assert lives.run(3) == 1
    assert lives.words == [[]]
    assert "it is not restarted: [Errno 30] Read-only file system" in capfd.readouterr().err
