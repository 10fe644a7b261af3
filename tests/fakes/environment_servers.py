"""What real servers of OpenEnv and NeMo Gym answered, said again to whoever asks the same.

``recorded/`` has sessions of the servers of examples/environments, and of one with tools (``openenv_tools.py``). Real
servers are compared with them by tests/e2e/test_environment_servers.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

RECORDED = Path(__file__).parent / "recorded"
Recording = dict[str, Any]
"""``package`` names the server's with its version; ``sessions`` are lists of [what was sent, what was answered]."""


def recording(name: str) -> Recording:
    return json.loads((RECORDED / f"{name}.json").read_text())


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The URL of a server."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def openenv(answers: Recording) -> web.Application:
    """A server that says what was recorded."""
    app = web.Application()

    async def schema(request: web.Request) -> web.Response:
        return web.json_response(answers["schema"])

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        said: list[Any] = []
        async for message in socket:
            said.append(json.loads(message.data))
            await socket.send_json(_answer(answers, said))
        return socket

    app.add_routes([web.get("/schema", schema), web.get("/ws", session)])
    return app


def nemo_gym(answers: Recording) -> web.Application:
    """A server that says what was recorded, to whoever keeps the session's cookie."""
    app = web.Application()
    sessions: dict[str, list[Any]] = {}

    async def paths(request: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in answers["paths"]}})

    async def asked(request: web.Request) -> web.Response:
        number = request.cookies.get("session", str(len(sessions)))
        said = sessions.setdefault(number, [])
        said.append(_timeless([request.path, await request.json()]))
        status, body = _answer(answers, said)
        response = web.Response(status=status, text=body, content_type="application/json")
        response.set_cookie("session", number)
        return response

    app.add_routes([web.get("/openapi.json", paths), web.post("/{path}", asked)])
    return app


def _answer(answers: Recording, said: list[Any]) -> Any:
    """What was answered to the last of what was said, in the session that began so."""
    for session in answers["sessions"]:
        begun = session[: len(said)]
        if [sent for sent, _ in begun] == said:
            return begun[-1][1]
    raise web.HTTPNotFound(text=f"not recorded: {json.dumps(said)}")


async def ask_openenv(url: str, sessions: list[list[Any]]) -> Recording:
    """What a server answers to each session's messages."""
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/schema") as response:
            schema = await response.json()
        answered = []
        for messages in sessions:
            async with http.ws_connect(f"{url}/ws") as socket:
                exchanges = []
                for message in messages:
                    await socket.send_json(message)
                    exchanges.append([message, _without_links(await socket.receive_json(timeout=60))])
                answered.append(exchanges)
    return {"schema": {kind: schema[kind] for kind in ("action", "observation")}, "sessions": answered}


async def ask_nemo_gym(url: str, sessions: list[list[Any]]) -> Recording:
    """What a server answers to each session's requests, [path, body]."""
    answered = []
    for requests in sessions:
        closing = aiohttp.TCPConnector(force_close=True)  # as the server does after an exception
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), connector=closing) as http:
            exchanges = []
            for path, body in requests:
                async with http.post(url + path, json=body) as response:
                    exchanges.append([[path, body], [response.status, _without_task(await response.text())]])
            answered.append(exchanges)
    async with aiohttp.ClientSession() as http, http.get(f"{url}/openapi.json") as response:
        paths = sorted((await response.json())["paths"])
    return {"paths": paths, "sessions": answered}


def _without_links(value: Any) -> Any:
    """Without pydantic's links to its documentation, which name its version."""
    return _mapped(value, lambda item: {name: each for name, each in item.items() if name != "url"})


def _without_task(text: str) -> str:
    """An answer of /verify without the task and the response, which it repeats."""
    try:
        told = json.loads(text)
    except ValueError:
        return text
    if not isinstance(told, dict) or "reward" not in told:
        return text
    return json.dumps({name: told[name] for name in told if name not in ("responses_create_params", "response")})


def _timeless(value: Any) -> Any:
    return _mapped(value, lambda item: {**item, "created_at": 0} if "created_at" in item else item)


def _mapped(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(value, dict):
        return change({name: _mapped(each, change) for name, each in value.items()})
    return [_mapped(each, change) for each in value] if isinstance(value, list) else value
