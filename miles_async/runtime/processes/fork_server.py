"""Import modules once, then fork a process for each request, which starts with them imported.

    python -m miles_async.runtime.processes.fork_server DESCRIPTOR LATE MODULE... PADDING

DESCRIPTOR is a listening socket, LATE a pattern of environment variables that no import reads, PADDING room for the
titles of children. A connection is one child: a request comes in with descriptors for the child's stdout and stderr,
its pid goes out, then its exit status. When the connection closes first, the client is gone, and the child's process
group is killed. The child itself dies with the server (PR_SET_PDEATHSIG). ``forking.py`` and
``forked_worker.py`` have the other side. Servers themselves are forked from ``common_imports.py``.

A child runs ``python -m module`` or ``python script.py`` in its own session, environment and working directory. Imports
have read the environment already, so a request whose environment differs in anything but LATE is refused; and since a
fork copies one thread only, so is every request if importing has left others running. A refused client starts an
interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import setproctitle

from miles_async.runtime.processes.dies_with_parent import die_with

MAX_REQUEST = 1 << 20  # bytes: arguments and an environment
TITLE_VARIABLE = "SPT_NOENV"  # setproctitle writes over arguments only: the environment marks processes of a run
ROOM_FOR_TITLES = 600  # characters: children write theirs over the arguments of the server


class ForkLoop:
    """The loop of the server. Single-threaded, or forking would not be safe."""

    def __init__(self, listener: socket.socket, late: str, environment: Mapping[str, str]) -> None:
        """``environment``: this process's at its start, which imports have seen."""
        self._listener = listener
        self._late = late
        self._environment = dict(environment)
        self._set_by_imports = dict(os.environ.items() - self._environment.items())
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._children: dict[socket.socket, int] = {}  # connection → pid
        self._exits: dict[int, socket.socket] = {}  # pidfd → connection

    def run(self) -> list[str]:
        """Serve requests. Returns in each child only: the arguments of the interpreter that it is to be."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, int):
                    self._ended(key.fileobj)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:  # not closed just now
                    if (arguments := self._read_request(key.fileobj)) is not None:
                        return arguments

    def _read_request(self, connection: socket.socket) -> list[str] | None:
        """Read a request, or handle a closed connection. Returns the arguments of the new process, in that process."""
        message, output = b"", list[int]()
        with suppress(ConnectionError):
            message, output, _, _ = socket.recv_fds(connection, MAX_REQUEST, 2)
        if len(output) < 2:
            if (pid := self._children.get(connection)) is not None:
                for kill in (os.killpg, os.kill):  # it may not lead its group yet; its end closes the connection
                    with suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
                self._selector.unregister(connection)
            else:
                self._close(connection)
            return None
        try:
            return self._fork(connection, json.loads(message), output)
        finally:
            for descriptor in output:
                os.close(descriptor)

    def _fork(self, connection: socket.socket, request: Mapping[str, Any], output: Sequence[int]) -> list[str] | None:
        arguments: list[str] = request["arguments"]
        environment: dict[str, str] = request["environment"]
        if reason := self._refusal(arguments, environment):
            _send(connection, refused=reason)
            return None
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, too many processes
            _send(connection, refused=str(error))
            return None
        if pid == 0:
            self._forget()
            become_leader(server, output)
            os.chdir(request["directory"])
            take_environment(environment | self._set_by_imports)
            setproctitle.setproctitle(request["title"])
            return arguments
        self._children[connection] = pid
        exited = os.pidfd_open(pid)
        self._exits[exited] = connection
        self._selector.register(exited, selectors.EVENT_READ)
        _send(connection, pid=pid)
        return None

    def _refusal(self, arguments: list[str], environment: Mapping[str, str]) -> str:
        """Why no process with these arguments and this environment can be forked; empty if it can."""
        if arguments[0].startswith("-") and arguments[0] != "-m":
            return f"expected a script or -m and a module, found {arguments[0]}"
        ours = self._set_by_imports.items() & environment.items()  # the client may have imported the same
        return refusal(environment, self._environment | dict(ours), self._late)

    def _ended(self, exited: int) -> None:
        self._selector.unregister(exited)
        connection = self._exits.pop(exited)
        os.close(exited)
        _, status = os.waitpid(self._children.pop(connection), 0)
        _send(connection, status=os.waitstatus_to_exitcode(status))
        self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        with suppress(KeyError):  # the client is gone already
            self._selector.unregister(connection)
        connection.close()

    def _forget(self) -> None:
        """In a child: release the server's resources."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        for connection in self._children:  # not in the selector if the client is gone
            connection.close()
        self._selector.close()


def refusal(environment: Mapping[str, str], seen: Mapping[str, str], late: str) -> str:
    """Why this process cannot fork one with ``environment``; empty if it can.

    ``seen``: the environment in which it has imported. ``late``: pattern of the variables that no import reads.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"importing has started {threads - 1} threads"
    names = {name for name, _ in environment.items() ^ seen.items()} - {TITLE_VARIABLE}
    if early := sorted(name for name in names if not re.fullmatch(late, name)):
        return f"imports have seen other values of {', '.join(early)}"
    return ""


def become_leader(server: int, output: Sequence[int]) -> None:
    """Lead a session whose stdout and stderr are ``output`` and which ends with ``server``."""
    os.setsid()
    die_with(server)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((nothing, *output), (0, 1, 2), strict=True):
        os.dup2(source, target)
    os.close(nothing)


def take_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process, and what Python has derived from it."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    path = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [entry for entry in path if entry not in sys.path]


def command(descriptor: int, late: str, modules: Sequence[str]) -> list[str]:
    """Arguments of an interpreter that runs this server."""
    return ["-m", __name__, str(descriptor), late, *modules, " " * ROOM_FOR_TITLES]


def _send(connection: socket.socket, **message: object) -> None:
    with suppress(OSError):  # the client is gone
        connection.send(json.dumps(message).encode())


def import_modules(modules: Sequence[str]) -> None:
    """Import them for children that are forked from this process."""
    gc.disable()  # nearly all that is made now stays, and looking through it takes seconds
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # pages that a collection in a child would write to stay shared
    gc.enable()


def serve(listener: socket.socket, late: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Import, serve, and in a child run the request. ``environment``: this process's at its start."""
    import_modules(modules)
    arguments = ForkLoop(listener, late, environment).run()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(sys.argv[0], None)  # it runs again, as __main__
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    descriptor, late, *modules, _ = sys.argv[1:]
    setproctitle.getproctitle()  # it takes note of where arguments are, once
    serve(socket.socket(fileno=int(descriptor)), late, modules, dict(os.environ))


if __name__ == "__main__":
    main()
