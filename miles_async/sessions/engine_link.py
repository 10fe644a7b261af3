"""Generation for the session server through the rollout process, over a socket in the file system.

Whether requests may go out, and whether an answer may be used, is known in one place: the client of the rollout
process, next to the registry of engines (C8). So the session server asks it instead of the router. Two ends::

    session server                              rollout process
    EngineLink.generate ── GenerateRequest ──►  serve_engines ──► RouterClient
                        ◄── Generation ───────
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from miles_async import errors
from miles_async.api import EngineClient
from miles_async.errors import MilesAsyncError, TransientEngineError
from miles_async.runtime.serialization import decode, encode
from miles_async.sessions.records import Alive
from miles_async.types import GenerateRequest, Generation

_FAILED = 599  # the client raised: an answer as good as any
_MAX_BODY = 1 << 30


class EngineLink:
    """EngineClient of the session server, its end of the socket."""

    def __init__(self, socket_path: Path) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket_path), limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``api.EngineClient``; the deadlines are those of the client on the other side."""
        return decode(await self._post("/generate", encode(request)), Generation)

    async def report(self, alive: Alive) -> None:
        """Send a report. Raises TransientEngineError when the rollout process is gone."""
        await self._post("/alive", encode(alive))

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _post(self, path: str, body: bytes) -> bytes:
        try:
            async with self._session.post(f"http://rollout{path}", data=body) as response:
                status, content = response.status, await response.read()
        except aiohttp.ClientError as error:
            raise TransientEngineError(f"the rollout process does not answer: {error!r}") from error
        if status == 200:
            return content
        name, _, message = content.decode(errors="replace").partition("\n")
        raised = getattr(errors, name, None)
        if status == _FAILED and isinstance(raised, type) and issubclass(raised, MilesAsyncError):
            raise raised(message)
        raise TransientEngineError(f"the rollout process failed: HTTP {status}: {content[:500]!r}")


async def serve_engines(
    client: EngineClient, on_alive: Callable[[Alive], None], socket_path: Path
) -> Callable[[], Awaitable[None]]:
    """Serve generation to the session server, at the rollout process's end. Returns a function that stops it."""

    async def generate(request: web.Request) -> web.Response:
        try:
            generation = await client.generate(decode(await request.read(), GenerateRequest))
        except MilesAsyncError as error:
            return web.Response(status=_FAILED, text=f"{type(error).__name__}\n{error}")
        return web.Response(body=encode(generation))

    async def alive(request: web.Request) -> web.Response:
        on_alive(decode(await request.read(), Alive))
        return web.Response()

    app = web.Application(client_max_size=_MAX_BODY)
    app.add_routes([web.post("/generate", generate), web.post("/alive", alive)])
    # An agent that hangs up ends its request here, and so at the engine.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket_path)).start()
    return runner.cleanup
