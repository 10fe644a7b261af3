"""Run untrusted programs in the sandbox of ``sandbox.py``. Blocks until they end: call it in a worker process."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from miles_async.errors import ServiceUnavailableError
from miles_async.rewards import sandbox

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # not the run's, which contains keys
_ROOT = str(Path(__file__).resolve().parents[2])  # where this package is imported from; the program can't
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from miles_async.rewards.sandbox import main; "
    "del sys.path[0]; main()"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one program, and its confinement."""

    seconds: float
    memory_bytes: int  # of address space
    level: sandbox.Level = "landlock"


def run_program(source: str, text: str, limits: Limits) -> str | None:
    """Return the output of the program for input ``text``; None if it fails, takes too long or prints too much.

    Raises ServiceUnavailableError when the sandbox cannot be set up.
    """
    with _started("program", source, text, limits) as process:
        ended = _ends(process, limits.seconds)
        output = process.end()
    return output if ended and process.status == 0 else None


def run_statements(source: str, statements: str, limits: Limits) -> bool:
    """Return whether all statements pass, executed after the program and in another process.

    Raises ServiceUnavailableError when the sandbox cannot be set up.
    """
    with ExitStack() as stack:
        with ExitStack() as pipes:  # closed here as soon as both have them: a half that dies is the end of its pipes
            requests, answers = os.pipe(), os.pipe()
            for end in (*requests, *answers):
                pipes.callback(os.close, end)
            served = stack.enter_context(_started("serve", source, "", limits, pipes=(requests[0], answers[1])))
            judging = stack.enter_context(_started("judge", statements, "", limits, pipes=(answers[0], requests[1])))
        ended = _ends(judging, limits.seconds)
        served.end()
        judging.end()
    return ended and judging.status == sandbox.PASSED


@dataclass(slots=True)
class _Confined:
    """A confined process. Its input and output are files, so that writing never blocks it."""

    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    status_end: int
    status: int | None = None

    def end(self) -> str:
        """Return what the program printed; kill it if it still runs.

        Raises ServiceUnavailableError if it could not be confined.
        """
        too_slow = self.process.poll() is None
        self.process.kill()
        self.status = self.process.wait()
        report = os.read(self.status_end, 4096)
        if report != sandbox.STARTED and (report or not too_slow):  # a busy machine may not even have started it
            found = report.decode(errors="replace") or f"no answer, exit status {self.status}"
            raise ServiceUnavailableError(f"the sandbox for code cannot be set up: {found}")
        self.stdout.seek(0)
        return self.stdout.read().decode(errors="replace")


@contextmanager
def _started(role: str, source: str, text: str, limits: Limits, *, pipes: Sequence[int] = ()) -> Iterator[_Confined]:
    program = source.encode(errors="replace")
    with _memory_file() as stdin, _memory_file() as stdout, ExitStack() as stack:
        status_end, reports_to = os.pipe()
        stack.callback(os.close, status_end)
        passed = (reports_to, *pipes)
        bounds = (math.ceil(limits.seconds), limits.memory_bytes, len(program))
        numbers = (os.getpid(), *bounds, reports_to, *(pipes or (-1, -1)))
        stdin.write(program + text.encode(errors="replace"))
        stdin.seek(0)
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _START, _ROOT, role, limits.level),
                *(sysconfig.get_paths()["purelib"], *map(str, numbers)),
            ],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=passed,
            cwd="/",
            env=_ENVIRONMENT,
        )
        os.close(reports_to)
        try:
            yield _Confined(process, stdout, status_end)
        finally:
            process.kill()
            process.wait()


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("program"), "w+b", buffering=0)


def _ends(confined: _Confined, seconds: float) -> bool:
    """Return whether the process ends in time. Popen's own wait would poll every 50 ms only."""
    descriptor = os.pidfd_open(confined.process.pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
