"""The process that runs a fork server (``fork_server.py``), for whoever owns it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from miles_async.runtime import fork_server, forked_worker
from miles_async.runtime.child_process import ChildProcess
from miles_async.runtime.forking import listen
from miles_async.runtime.tasks import afterwards

READ_LATE = "TMPDIR|MILES_ASYNC_.*|RAY_.*|(GLOO|NCCL)_SOCKET_IFNAME|PYTHONBREAKPOINT"  # no import but Ray's reads them
_ROOM_FOR_TITLES = 600  # characters: children write theirs over the arguments of the server


class ForkServerProcess:
    """A child of this process that imports ``modules`` and forks others; they all die with this process."""

    def __init__(
        self, path: Path, modules: Sequence[str], *, late: str, log_path: Path, environment: Mapping[str, str]
    ) -> None:
        """``path``: of its socket. ``late``: pattern of the variables that no import reads. Others have to be the same
        for all of its children: ``environment`` adds to ours what children have beyond it.
        """
        self.path = path
        self._modules = tuple(modules)
        self._late = late
        self._log_path = log_path
        self._environment = {**environment, fork_server.TITLE_VARIABLE: "1"}
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def interpreter(self, title: str) -> str:
        """Command of an interpreter that is forked, for Ray's ``py_executable``. ``title``: name of its process."""
        return shlex.join([sys.executable, "-I", "-S", forked_worker.__file__, str(self.path), title])

    def start(self) -> None:
        """Start importing. Requests may come from now on: they wait."""
        with listen(self.path) as listener:
            command = ["-m", fork_server.__name__, str(listener.fileno()), self._late, *self._modules]
            self._process = ChildProcess(
                "fork-server",
                [*command, " " * _ROOM_FOR_TITLES],
                log_path=self._log_path,
                environment=self._environment,
                descriptors=[listener.fileno()],
            )
            self._process.start()

    async def stop(self) -> None:
        """End it and its children, at once."""
        if self._process is not None:
            await self._process.stop(grace_seconds=0)
        self.path.unlink(missing_ok=True)


@asynccontextmanager
async def running(server: ForkServerProcess | None) -> AsyncIterator[None]:
    """Have the server import and fork during the context. None: there is none."""
    if server is None:
        yield
        return
    server.start()
    async with afterwards(server.stop):
        yield
