"""Real SGLang servers, each behind a proxy that passes everything on, or does what a broken engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from miles_async.engines.external import ExternalServers
from miles_async.engines.kind import LaunchServer
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from tests.integration.real_run import shared_memory

PassOn = Callable[[], Awaitable[web.Response]]
Fault = Callable[["FaultyEngine", PassOn], Awaitable[web.Response]]
"""Action in place of passing a request on to the server; it may pass it on itself."""

_NOT_PASSED_ON = {"host", "content-length", "transfer-encoding", "connection"}


async def refuses(_: FaultyEngine, __: PassOn) -> web.Response:
    return web.json_response({"success": False, "message": "not now"}, status=400)


async def does_nothing(_: FaultyEngine, __: PassOn) -> web.Response:
    """And says that it did."""
    return web.json_response({"success": True, "message": "done"})


async def hangs(engine: FaultyEngine, pass_on: PassOn) -> web.Response:
    """Its front answers what it can by itself; the scheduler does nothing more."""
    engine.scheduler().suspend()
    return await pass_on()


async def dies(engine: FaultyEngine, pass_on: PassOn) -> web.Response:
    engine.server().kill()
    return await pass_on()


class FaultyEngine:
    """A ``ServerHandle`` of one server over all its starts. One that lives is not started again, which would take
    half a minute: it keeps the weights that it has, and gets another address.
    """

    def __init__(self, launch: LaunchServer, index: int) -> None:
        self.faults: dict[str, Fault] = {}  # by path
        self.passed_on: list[str] = []  # paths
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.keeps_address = False
        self.processes: list[psutil.Process] = []  # servers and their schedulers, of all starts
        self._launch = launch
        self._index = index
        self._starts = 0
        self._server: ServerProcess | None = None
        self._target = ""
        self._address = ""
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    def server(self) -> psutil.Process:
        return self.processes[-2]

    def scheduler(self) -> psutil.Process:
        return self.processes[-1]

    async def start(self) -> str:
        await self.may_start.wait()
        if self._server is None or not await self._server.alive():
            if self._server is not None:
                await self._server.stop()
            server: Any = self._launch(self._index, self._starts)
            self._server, self._target = server, await server.start()
            self._starts += 1
            main = psutil.Process(await server.pid())
            [scheduler] = [child for child in main.children() if "scheduler" in child.name()]
            self.processes += [main, scheduler]
            assert not shared_memory(main)  # nobody would remove it after a kill -9 of its owner, too
        if not self.keeps_address:
            await self._close_proxy()
            await self._open_proxy()
        return self._address

    async def wait_exit(self) -> str:
        assert self._server is not None
        return await self._server.wait_exit()

    async def on_host(self, function: Callable[..., object], room: int, *arguments: object) -> object:
        assert self._server is not None
        return await self._server.on_host(function, room, *arguments)

    async def stop(self) -> None:
        """As of a server that is not ours."""
        await ExternalServers([self._address.removeprefix("http://")], 1.0, SGLangServer)(0, 0).stop()

    async def close(self) -> None:
        """End it."""
        if self._server is not None:
            await self._server.stop()
        await self._close_proxy()

    async def _open_proxy(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _close_proxy(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()

        async def pass_on() -> web.Response:
            self.passed_on.append(request.path)
            return await self._pass_on(request, body)

        fault = self.faults.get(request.path)
        return await (fault(self, pass_on) if fault else pass_on())

    async def _pass_on(self, request: web.Request, body: bytes) -> web.Response:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED_ON}
        url = self._target + request.path_qs
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                content = await answer.read()
                return web.Response(body=content, status=answer.status, content_type=answer.content_type)
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=repr(error)) from error
