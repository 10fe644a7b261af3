"""The SDK's own server at a URL and as a command: the calculator's example."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from miles_async.errors import ServiceUnavailableError
from miles_async.integrations import mcp_session
from miles_async.integrations.mcp_session import McpServer, McpSession
from miles_async.integrations.mcp_tools import MakeWithTools, McpServers
from miles_async.runtime.network.ports import HeldPort
from tests.unit.integrations.test_mcp_tools import PROMPT, contents, turn

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
    wrong = await one.step(turn(("calculator", {"formula": "17*23"})))
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
            await asyncio.wait_for(each.step(turn(("calculator", {"expression": "1+1"}))), 20)
        await each.close()


async def test_a_url_that_never_answers_the_end_of_a_session_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_session, "_END_SECONDS", 0.3)

    async def post(request: web.Request) -> web.Response:
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        asked = message["params"]["protocolVersion"]
        told = {"protocolVersion": asked, "capabilities": {}, "serverInfo": {"name": "fake", "version": "1"}}
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": told if message["method"] == "initialize" else {}}
        return web.json_response({**answer}, headers={"mcp-session-id": "one"})

    async def delete(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(600)
        raise AssertionError

    asked, app = asyncio.Event(), web.Application()
    app.add_routes([web.post("/mcp", post), web.delete("/mcp", delete)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    session = McpSession(McpServer(f"http://127.0.0.1:{runner.addresses[0][1]}/mcp", tmp_path / "mcp.log"))
    await session._open()
    await asyncio.wait_for(session.close(), 20)
    assert asked.is_set()
    assert session._keeper is not None
    assert session._keeper.done()
    await runner.cleanup()
