"""Runs a program on one input, in the sandbox of ``sandbox.py``. Waits for it: to be called in a worker process."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import sysconfig
from typing import IO

from miles_async.rewards import sandbox

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # and nothing of ours, which has keys in it


def run_program(source: str, text: str, seconds: float, memory_bytes: int) -> str | None:
    """What the program prints when it reads ``text``; None if it fails, takes too long or prints too much.

    Raises RuntimeError when the sandbox cannot be set up.
    """
    program = source.encode(errors="replace")
    # Files instead of pipes: nobody has to read while it writes, and the kernel stops it at the size limit.
    with _memory_file() as stdin, _memory_file() as stdout:
        stdin.write(program + text.encode(errors="replace"))
        stdin.seek(0)
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-B", "-X", "utf8", sandbox.__file__, str(os.getpid())),
                *map(str, (math.ceil(seconds), memory_bytes, len(program), sysconfig.get_paths()["purelib"])),
            ],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_ENVIRONMENT,
        )
        try:
            ended = _ends(process, seconds)
        finally:
            process.kill()
            status = process.wait()
        stdout.seek(0)
        output = stdout.read().decode(errors="replace")
    if not output.startswith(sandbox.STARTED):
        raise RuntimeError(f"the sandbox for code cannot be set up: {output or f'no answer, exit status {status}'}")
    return output.removeprefix(sandbox.STARTED) if ended and status == 0 else None


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("program"), "w+b", buffering=0)


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends in time. Popen's own wait would look every 50 ms only."""
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
