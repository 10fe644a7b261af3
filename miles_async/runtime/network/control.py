"""Control socket of a run: one line of JSON each way, over a Unix socket that only this user can reach.

The socket is in the run's temporary directory, since paths of sockets are short; ``run.json`` says where.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import structlog

from miles_async.errors import ConfigurationError, MilesAsyncError

log = structlog.get_logger(__name__)

REQUEST_SECONDS = 60.0

Handler = Callable[..., Awaitable[str]]


class ControlServer:
    """Answers requests while its context is open.

    >>> async with ControlServer(path, {"scale": scale}):
    ...     answer = await asyncio.to_thread(call, path, "scale", group="engine", engines=3)
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        """``path``: of the socket. ``handlers``: command → a function of its arguments by name, which says what it did
        or raises MilesAsyncError.
        """
        self._handlers = handlers
        self._path = path
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ControlServer:
        self._server = await asyncio.start_unix_server(self._answer, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._path.unlink(missing_ok=True)  # a cleaner of /tmp may have removed it

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            writer.write(json.dumps(await self._handle(**request)).encode() + b"\n")
            await writer.drain()
        except (ValueError, ConnectionError):  # not ours to answer, or it did not wait
            pass
        finally:
            writer.close()

    async def _handle(self, command: str, **arguments: object) -> dict[str, str]:
        if command not in self._handlers:
            return {"error": f"the run knows no command {command}; it knows {', '.join(self._handlers)}"}
        try:
            return {"result": await self._handlers[command](**arguments)}
        except MilesAsyncError as error:
            return {"error": str(error)}
        except Exception as error:  # supervision point: a command must not cost the run
            log.exception("a command failed", command=command)
            return {"error": f"internal error of the run: {error!r}"}


def call(path: Path, command: str, **arguments: object) -> str:
    """Send a command and return the run's answer. Raises ConfigurationError if the run refuses or is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REQUEST_SECONDS)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            line = connection.makefile("rb").readline()
        except OSError as error:
            raise ConfigurationError(f"the run does not answer ({error}): is it still starting, or ending?") from None
    if not line:
        raise ConfigurationError("the run closed the connection: it is ending")
    answer = json.loads(line)
    if "error" in answer:
        raise ConfigurationError(answer["error"])
    return str(answer["result"])
