"""Processes that a fork server forks for us (``fork_server.py``): the server from outside, and its children."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_async.runtime.processes.forked_worker import IMPORTS_SECONDS

_MAX_ANSWER = 1 << 16
_BACKLOG = 128


class CannotForkError(Exception):
    """There is no server, or it refuses: the process has to start by itself."""


class ForkedProcess:
    """A child of a fork server, with as much of Popen's interface as ``ChildProcess`` needs.

    It dies with the server, and with whoever holds this object: the connection closes, and the server kills its group.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._returncode: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self._returncode is None:
            with suppress(BlockingIOError):
                self._returncode = self._exit_status()
                self._connection.close()
        return self._returncode

    def _exit_status(self) -> int:
        try:
            answer = self._connection.recv(_MAX_ANSWER)
        except ConnectionError:
            answer = b""
        return int(json.loads(answer)["status"]) if answer else -signal.SIGKILL  # it died with its server


async def fork(server: Path, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess:
    """Have the server at ``server`` fork ``python *arguments``; returns when it exists, for which imports have to end.

    ``output``: descriptor for its stdout and stderr. Raises CannotForkError.
    """
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "directory": str(Path.cwd()),
        "title": " ".join([sys.executable, *arguments]),
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(str(server))
        socket.send_fds(connection, [json.dumps(request).encode()], [output, output])
        async with asyncio.timeout(IMPORTS_SECONDS):
            await _readable(connection)
        told: dict[str, Any] = json.loads(connection.recv(_MAX_ANSWER) or b'{"refused": "it is ending"}')
    except TimeoutError as error:
        connection.close()
        raise CannotForkError(f"the fork server at {server} has imported for {IMPORTS_SECONDS:g} s") from error
    except OSError as error:
        connection.close()
        raise CannotForkError(f"the fork server at {server} does not answer: {error}") from error
    except BaseException:
        connection.close()
        raise
    if "refused" in told:
        connection.close()
        raise CannotForkError(f"the fork server at {server} refuses: {told['refused']}")
    return ForkedProcess(connection, told["pid"])


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
