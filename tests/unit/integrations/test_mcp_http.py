"""The SDK's own server at a URL and as a command: the calculator's example."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from miles_async.errors import ServiceUnavailableError
from miles_async.integrations import mcp_session
from miles_async.integrations.mcp_session import McpServer, McpSession
from miles_async.integrations.mcp_tools import MakeWithTools, McpServers
from miles_async.runtime.network.ports import HeldPort
from tests.fakes.environment_servers import serving
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.turns import calling
from tests.unit.integrations.test_mcp_tools import PROMPT, call_of, contents
from tests.unit.rollout.test_multi_turn import ATTEMPT, generate_with, says

MODULE = "examples.calculator_tool.mcp_server"


@dataclass(frozen=True)
class Listening:
    process: asyncio.subprocess.Process
    url: str


@pytest.fixture
async def server() -> AsyncIterator[Listening]:
    """A server of the SDK, which is killed at the end."""
    with HeldPort("127.0.0.1") as free:
        port = free.number
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, str(port))
    try:
        await listening(port)
        yield Listening(process, f"http://127.0.0.1:{port}/mcp")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def listening(port: int) -> None:
    for _ in range(1500):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    raise AssertionError("the server did not start within 150 s")


async def calculates(server: str, tmp_path: Path) -> None:
    servers = McpServers([server], shared=False, start_timeout=150.0, log_path=tmp_path / "mcp.log")
    await servers.start()
    one, other = (MakeWithTools(servers, None)(PROMPT) for _ in range(2))
    (tool,) = one.tools()
    assert tool["function"]["name"] == "calculator"
    assert list(tool["function"]["parameters"]["properties"]) == ["expression"]
    told = await asyncio.gather(*(contents(each, ("calculator", {"expression": "17*23"})) for each in (one, other)))
    assert told == [["391"], ["391"]]
    wrong = await one.step(calling(("calculator", {"formula": "17*23"})))
    assert "expression" in wrong.messages[0]["content"]  # which of its arguments is missing
    assert wrong.metrics["tool_errors"] == 1
    await asyncio.gather(one.close(), other.close())


async def test_a_server_of_the_sdk_is_a_command(tmp_path: Path) -> None:
    await calculates(f"python -m {MODULE}", tmp_path)


async def test_a_server_of_the_sdk_is_a_url(server: Listening, tmp_path: Path) -> None:
    await calculates(server.url, tmp_path)


async def test_a_url_that_stops_answering_is_a_service_that_is_down(server: Listening, tmp_path: Path) -> None:
    # covers: C6
    servers = McpServers([server.url], shared=False, start_timeout=150.0, log_path=tmp_path / "mcp.log")
    await servers.start()
    environment = MakeWithTools(servers, None)(PROMPT)
    assert await contents(environment, ("calculator", {"expression": "1+1"})) == ["2"]
    server.process.kill()
    await server.process.wait()
    for each in (environment, MakeWithTools(servers, None)(PROMPT)):  # in a session, and without one
        with pytest.raises(ServiceUnavailableError, match=f"the MCP server {server.url} failed: ConnectError"):
            await asyncio.wait_for(each.step(calling(("calculator", {"expression": "1+1"}))), 20)
        await each.close()


def counting(
    sessions: dict[str, int], together: asyncio.Barrier, end: Callable[[str], Awaitable[None]]
) -> web.Application:
    """A server with one tool, which counts its calls in a session. First calls wait for each other."""

    async def post(request: web.Request) -> web.Response:
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        session = request.headers.get("mcp-session-id", str(len(sessions)))
        match message["method"]:
            case "initialize":
                sessions[session] = 0
                version = message["params"]["protocolVersion"]
                info = {"name": "fake", "version": "1"}
                result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                result = {"tools": [{"name": "count", "inputSchema": {"type": "object"}}]}
            case _:
                sessions[session] += 1
                if sessions[session] == 1:
                    await together.wait()
                result = {"content": [{"type": "text", "text": str(sessions[session])}]}
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        return web.json_response(answer, headers={"mcp-session-id": session})

    async def delete(request: web.Request) -> web.Response:
        await end(request.headers["mcp-session-id"])
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/mcp", post), web.delete("/mcp", delete)])
    return app


async def test_two_hundred_episodes_at_once_have_a_session_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C2, R3
    sessions, ended, read = dict[str, int](), list[str](), list[object]()
    read_certificates = ssl.create_default_context

    def reading(**options: Any) -> ssl.SSLContext:
        read.append(options)
        return read_certificates(**options)

    monkeypatch.setattr(ssl, "create_default_context", reading)

    async def end(session: str) -> None:
        ended.append(session)

    async with serving(counting(sessions, asyncio.Barrier(200), end)) as url:
        servers = McpServers([f"{url}/mcp"], shared=False, start_timeout=60.0, log_path=tmp_path / "mcp.log")
        await servers.start()
        generate = generate_with(MakeWithTools(servers, None), step_timeout=100.0)
        models = [ScriptedModel(says(call_of("count"), call_of("count"), "done")) for _ in range(200)]
        samples = await asyncio.gather(*(generate(model, ATTEMPT, n) for n, model in enumerate(models)))
    for sample in samples:
        told = [message["content"] for message in sample.metadata["messages"] if message["role"] == "tool"]
        assert told == ["1", "2"]
    assert sorted(sessions.values()) == [0, *[2] * 200]  # the first one lists the tools
    assert sorted(ended) == sorted(sessions)
    assert len(read) <= 1  # reading certificates for each session would hold up the loop for seconds


async def test_a_url_that_never_answers_the_end_of_a_session_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_session, "_END_SECONDS", 0.3)
    asked = asyncio.Event()

    async def end(session: str) -> None:
        asked.set()
        await asyncio.sleep(600)

    async with serving(counting({}, asyncio.Barrier(1), end)) as url:
        session = McpSession(McpServer(f"{url}/mcp", tmp_path / "mcp.log"))
        await session._open()
        await asyncio.wait_for(session.close(), 20)
        assert asked.is_set()
        assert session._keeper is not None
        assert session._keeper.done()
