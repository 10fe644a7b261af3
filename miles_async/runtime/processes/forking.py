"""Processes that a fork server forks for us (``fork_server.py``): the server from outside, and its children."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_async.runtime.processes.forked_worker import (
    IMPORTS_SECONDS,
    RefusedError,
    receive_pid,
    receive_status,
    request,
)

_BACKLOG = 128


class CannotForkError(Exception):
    """There is no server, or it refuses: the process has to start by itself."""


class ForkedProcess:
    """A child of a fork server, with as much of Popen's interface as ``ChildProcess`` needs.

    It dies with the server, and with the holder of this object: the connection closes, and the server kills its group.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._returncode: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self._returncode is None:
            try:
                status = receive_status(self._connection)
            except BlockingIOError:
                return None
            except ConnectionError:
                status = None
            self._connection.close()
            self._returncode = -signal.SIGKILL if status is None else status
        return self._returncode


async def fork(server: Path, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess:
    """Have the server at ``server`` fork ``python *arguments``; returns when it exists, for which imports have to end.

    ``output``: descriptor for its stdout and stderr. Raises CannotForkError.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        title = " ".join([sys.executable, *arguments])
        request(connection, str(server), arguments, environment, title, (output, output))
        async with asyncio.timeout(IMPORTS_SECONDS):
            await _readable(connection)
        return ForkedProcess(connection, receive_pid(connection))
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise CannotForkError(f"the fork server at {server} has imported for {IMPORTS_SECONDS:g} s") from error
        if isinstance(error, OSError):
            reason = error if isinstance(error, RefusedError) else f"it does not answer: {error}"
            raise CannotForkError(f"the fork server at {server}: {reason}") from error
        raise


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def listen(path: Path) -> socket.socket:
    """The socket on which a fork server listens: from now on requests wait for it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener
