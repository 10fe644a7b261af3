"""Runs ``miles-async train`` as a user would: a process of its own, with everything real, and nothing left after it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.types import JsonObject
from tests.integration.imported_server import MARK

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
LEAVING_SECONDS = 15.0
TRAIN_REVERSE = ("train", "@examples/quickstart/reverse.args")
REVERSE = (sys.executable, "-m", "miles_async", *TRAIN_REVERSE)
SHORT_RUN = ("--save-hf", "none", "--no-use-wandb", "--lr-warmup-iters", "0")  # a warm-up may be longer than the run


class RealRun:
    """One ``miles-async train``, under way or over."""

    def __init__(
        self, run_dir: Path, flags: tuple[str, ...], command: tuple[str, ...] = REVERSE, *, in_background: bool = False
    ) -> None:
        """``command``: relative to the root; flags are appended. ``in_background``: it ignores Ctrl-C, as what a
        script starts with ``&`` does.
        """
        on_ctrl_c = signal.SIG_IGN if in_background else signal.SIG_DFL
        prepare_quickstart(["--task", "reverse"])  # makes what is absent, in a second
        self.run_dir = run_dir
        self._mark = uuid.uuid4().hex
        self.output_path = run_dir.with_suffix(".out")
        with self.output_path.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(run_dir), *SHORT_RUN, *flags],
                cwd=ROOT,
                env={**os.environ, MARK: self._mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, on_ctrl_c),
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    @property
    def summary(self) -> JsonObject:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def steps(self) -> list[JsonObject]:
        """The trained steps of metrics.jsonl, as far as they are written."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if {"reward/mean", "sft/epoch"} & {*record}]

    def wait_for_steps(self, count: int, timeout: float) -> None:
        self._until(lambda: len(self.steps) >= count, timeout, f"{count} steps")

    def wait_for_output(self, text: str, timeout: float) -> None:
        self._until(lambda: text in self.output, timeout, repr(text))

    def wait(self, timeout: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout:g} s:\n{self.output}") from None

    def processes(self) -> list[psutil.Process]:
        """All processes of the run that are alive, wherever they hang in the process tree."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def engine_processes(self) -> list[psutil.Process]:
        """The SGLang servers' main processes, oldest first."""
        found = [p for p in self.processes() if "miles_async.engines.sglang.launcher" in " ".join(command_line(p))]
        return sorted(found, key=lambda process: process.create_time())

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of Ray's actors of that class."""
        found = [each for each in self.processes() if " ".join(command_line(each)).startswith(f"ray::{name}")]
        assert found, f"the run has no process of {name}"
        return sorted(found, key=lambda process: process.pid)

    def peak_memory(self) -> int:
        """The most bytes that one of its living processes has had in memory so far."""
        peaks = []
        for process in self.processes():
            with suppress(OSError):  # it has just ended
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks += [int(peak) << 10 for peak in re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)]
        return max(peaks)

    def assert_nothing_left(self) -> None:
        """No process, a moment after the end."""
        deadline = time.monotonic() + LEAVING_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, [command_line(process) for process in left]

    def end(self) -> None:
        """Whatever happened: leave nothing running."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # an agent, say, that has just ended
                process.kill()
        self.process.wait(10)

    def _until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} within {timeout:g} s:\n{self.output}"
            time.sleep(0.2)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            # Both are empty for a moment while the kernel replaces its program, and always in the kernel's threads.
            while not (environment := process.environ()) and not process.cmdline() and process.exe():
                time.sleep(0.01)
            return process.status() != psutil.STATUS_ZOMBIE and environment.get(MARK) == self._mark
        except (psutil.Error, OSError):
            return False


@contextmanager
def real_run(
    run_dir: Path, *flags: str, command: tuple[str, ...] = REVERSE, in_background: bool = False
) -> Iterator[RealRun]:
    """Start a run; at the end nothing of it is alive."""
    run = RealRun(run_dir, flags, command, in_background=in_background)
    try:
        yield run
    finally:
        run.end()


def shared_memory(process: psutil.Process) -> set[str]:
    """What it and its descendants have mapped of /dev/shm, and would leave there if they were killed."""
    maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in (process, *process.children(recursive=True))]
    lines = [line for text in maps for line in text.splitlines() if " /dev/shm/" in line]
    return {line.split()[5] for line in lines if not line.endswith(" (deleted)")}


def traceback_in(output: str) -> bool:
    """True if the user was shown a Python traceback."""
    return re.search(r"^Traceback", output, re.MULTILINE) is not None


def command_line(process: psutil.Process) -> list[str]:
    """Empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
