"""One supervised child process, with its own process group and log file, which ``stop`` removes completely."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import psutil

from miles_async.runtime.network.proxies import without_proxies
from miles_async.runtime.processes import dies_with_parent
from miles_async.runtime.processes.forking import CannotForkError, ForkedProcess, fork
from miles_async.runtime.processes.run_process import is_alive
from miles_async.runtime.texts import last_lines

_POLL_SECONDS = 0.1
_TAIL_BYTES = 64 * 1024


class ChildProcess:
    """A child that dies with us (PR_SET_PDEATHSIG), whose output goes to a file in the run directory (A7).

    Must be started from a thread that lives as long as the child should: Linux counts the death of the
    starting *thread*. The thread of the event loop does; a worker of ``asyncio.to_thread`` may not.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        """``command``: arguments of this interpreter, e.g. ("-m", "smg"). ``environment`` adds to ours,
        without proxies: it talks to processes of this run. ``descriptors``: of ours, to inherit.
        """
        self.name = name
        self.log_path = log_path
        self._command = tuple(command)
        self._environment = dict(environment)
        self._descriptors = tuple(descriptors)
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._segments: set[Path] = set()

    def start(self) -> None:
        """Start it; returns before it is useful."""
        wrapper = (sys.executable, "-I", "-S", dies_with_parent.__file__, str(os.getpid()))
        with self._log() as log:
            self._process = subprocess.Popen(
                [*wrapper, sys.executable, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self._environment),
                pass_fds=self._descriptors,
                start_new_session=True,
            )

    async def fork(self, server: Path) -> None:
        """Start the process through a fork server that has imported its modules; :meth:`start` it if there is none."""
        with self._log() as log:
            try:
                self._process = await fork(server, self._command, child_environment(self._environment), log.fileno())
                return
            except CannotForkError as error:
                log.write(f"it imports everything itself: {error}\n".encode())
        self.start()

    @contextmanager
    def _log(self) -> Iterator[FileIO]:
        assert self._process is None, f"{self.name} was started before"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab", buffering=0) as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(self._command)}\n".encode())
            yield log

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs (or before it started)."""
        return None if self._process is None else self._process.poll()

    def note_shared_memory(self) -> frozenset[Path]:
        """Shared memory seen so far; :meth:`stop` removes it even if the process has died before."""
        self._segments |= _shared_memory(_family(self.pid))
        return frozenset(self._segments)

    async def wait(self) -> int:
        """Wait for the end, by itself or by :meth:`stop`; return the exit status (negative: a signal)."""
        while (status := self.returncode) is None:  # noqa: ASYNC110  (no event: only waitpid knows)
            await asyncio.sleep(_POLL_SECONDS)
        return status

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """SIGTERM to the group, SIGKILL to survivors after ``grace_seconds``, descendants included."""
        if self._process is None:
            return
        family = _family(self._process.pid)
        if self.returncode is None and grace_seconds > 0:
            self._signal_group(signal.SIGTERM)
            await _gone(family, grace_seconds)
            family |= _family(self._process.pid)
        self._segments |= _shared_memory(family)
        self._signal_group(signal.SIGKILL)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await self.wait()
        for segment in self._segments:  # a killed process unlinks nothing, and /dev/shm would fill up
            segment.unlink(missing_ok=True)

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log, for error messages."""
        return "\n".join(last_lines(self.log_path, _TAIL_BYTES)[-lines:]) or "(no log)"

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)  # start_new_session: the group has the leader's pid


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child of this process: ours without proxies, and ``additions``."""
    environment = {**without_proxies(os.environ), **additions}
    # The child finds this package, installed or not.
    path = [str(Path(__file__).resolve().parents[3]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path)))}


def _family(pid: int) -> set[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        return {leader, *leader.children(recursive=True)}
    return set()


def _shared_memory(family: set[psutil.Process]) -> set[Path]:
    """POSIX shared memory and semaphores that these processes, which share none with us, have mapped.

    Found by inode: glibc makes a semaphore under another name and renames it.
    """
    inodes: set[int] = set()
    for process in family:
        with suppress(OSError):  # it ended meanwhile, or this is not Linux
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if " /dev/shm/" in line:
                    inodes.add(int(line.split()[4]))
    segments = set()
    for entry in Path("/dev/shm").iterdir() if inodes else ():
        with suppress(FileNotFoundError):  # another process's, gone meanwhile
            if entry.lstat().st_ino in inodes:
                segments.add(entry)
    return segments


async def _gone(family: set[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_alive(process) for process in family):
            return
        await asyncio.sleep(_POLL_SECONDS)
