"""Fork servers (``fork_server.py``) of a process that owns them, and the process that they are forked from
(``common_imports.py``).
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from miles_async.runtime.processes import common_imports, fork_server, forked_worker
from miles_async.runtime.processes.child_process import ChildProcess, child_environment
from miles_async.runtime.processes.forking import listen
from miles_async.runtime.tasks import afterwards

# Variables that no import reads: Ray, which reads its own, is never imported before a fork. Every shell sets some.
READ_LATE = (
    r"(OLD)?PWD|SHLVL|_|TMPDIR|PYTHONPATH|PYTHONBREAKPOINT|MILES_ASYNC_.*|RAY_.*|(GLOO|NCCL)_SOCKET_IFNAME"
    r"|(?i:(https?|all|no)_proxy)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkServer:
    """A process that imports ``modules`` and forks others: where it is and what it has imported."""

    path: Path  # of its socket
    modules: tuple[str, ...]
    environment: Mapping[str, str]  # additions of it and its children to this process's environment
    log_path: Path
    late: str = READ_LATE  # pattern of variables that may differ in its children: its imports don't read them
    own: str = ""  # pattern of variables that may differ in it: modules imported before its own don't read them

    def interpreter(self, title: str) -> str:
        """Command of an interpreter that is forked, for Ray's ``py_executable``. ``title``: name of its process."""
        return shlex.join([sys.executable, "-I", "-S", forked_worker.__file__, str(self.path), title])


class ForkServers:
    """A child of this process that imports modules and then forks servers; they all die with this process."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """``modules``: imports that the servers share. ``environment``: additions to ours."""
        self._connection, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = ChildProcess(
            "common imports",
            ["-m", common_imports.__name__, str(self._theirs.fileno()), *modules, " " * fork_server.ROOM_FOR_TITLES],
            log_path=Path(os.devnull),  # servers import the same, and have logs
            environment={**environment, fork_server.TITLE_VARIABLE: "1"},
            descriptors=[self._theirs.fileno()],
        )

    def start(self) -> None:
        with self._theirs:
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, servers: Iterable[ForkServer]) -> None:
        """Fork these servers; call it once. Requests may come from now on: they wait."""
        with self._connection, ExitStack() as files:
            for server in servers:
                server.log_path.parent.mkdir(parents=True, exist_ok=True)
                listener = files.enter_context(listen(server.path))
                log = files.enter_context(server.log_path.open("ab"))
                request = common_imports.ServerRequest(
                    title=f"fork server {server.path.name}",
                    modules=server.modules,
                    late="|".join(filter(None, (READ_LATE, server.own))),
                    children_late=server.late,
                    environment=child_environment(server.environment),
                )
                try:
                    socket.send_fds(self._connection, [msgspec.json.encode(request)], [listener.fileno(), log.fileno()])
                except OSError as error:  # the process has ended: each process imports by itself
                    log.write(f"it was not forked: {error}\n".encode())

    async def stop(self) -> None:
        """End all of them and their children, at once."""
        self._connection.close()
        await self._process.stop(grace_seconds=0)


@asynccontextmanager
async def running(*servers: ForkServer, modules: Sequence[str] = ()) -> AsyncIterator[ForkServers]:
    """Run fork servers during the context. ``modules``: modules that all of them import."""
    processes = ForkServers(modules, {})
    processes.start()
    async with afterwards(processes.stop):
        processes.fork(servers)
        yield processes
