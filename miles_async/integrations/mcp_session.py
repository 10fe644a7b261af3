"""One connection to an MCP server: a process that is spoken to by stdin and stdout, or a URL (streamable HTTP).

The SDK's transports are contexts that the task which entered them has to leave, and steps of an environment are tasks
of their own. So a task per connection holds the contexts, and calls wait for their answer or for the end of that task,
since the SDK does not answer all calls of a connection that breaks.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
from anyio import BrokenResourceError, ClosedResourceError
from mcp import ClientSession, McpError, StdioServerParameters, stdio_client, types
from mcp.client.streamable_http import streamable_http_client

from miles_async.arguments.sessions import is_url
from miles_async.errors import ServiceUnavailableError, UserCodeError, first_error
from miles_async.integrations.tool_calls import Answer
from miles_async.rollout.agent_command import command_words
from miles_async.rollout.wrapped_process import wrapped
from miles_async.runtime.network.keys import without_keys
from miles_async.runtime.services import is_outage
from miles_async.types import JsonObject

T = TypeVar("T")

_LOST = (types.CONNECTION_CLOSED, 408, 32600)  # the SDK's own errors: closed, timed out, an HTTP session that is gone
_END_SECONDS = 10.0  # more than the SDK takes to end a process: closed input, SIGTERM, SIGKILL
_CANCEL_SECONDS = 2.0
_TIMEOUT = httpx.Timeout(30.0, read=300.0)  # as the SDK's own client has it
_certificates = cache(httpx.create_ssl_context)  # once for all sessions: it takes the event loop 25 ms


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server as ``--mcp-server`` names it: a command, or a URL."""

    name: str
    log_path: Path  # of what a command writes to standard error

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientSession]:
        """A session that is not initialized yet. Nothing of a command is left after the context."""
        async with AsyncExitStack() as stack:
            if is_url(self.name):
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=_TIMEOUT, verify=_certificates()))
                read, write, _ = await stack.enter_async_context(streamable_http_client(self.name, http_client=client))
            else:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(self.log_path.open("a", encoding="utf-8"))
                read, write = await stack.enter_async_context(stdio_client(self._process(), errlog=log))
            yield await stack.enter_async_context(ClientSession(read, write))

    def _process(self) -> StdioServerParameters:
        program, *words = wrapped(command_words(self.name, "--mcp-server"))
        return StdioServerParameters(command=program, args=words, env=without_keys(os.environ))


class McpSession:
    """A session with a server, opened by its first use."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._keeper: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[ClientSession] | None = None
        self._over = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def is_lost(self) -> bool:
        """True once the connection broke: what the server kept of it is gone."""
        return self._over.is_set() or (self._keeper is not None and self._keeper.done())

    async def list_tools(self) -> list[types.Tool]:
        """List all tools of the server. Raises as :meth:`call` does."""
        session, tools, page = await self._open(), list[types.Tool](), None
        while True:
            listed = await self._answered(session.list_tools(params=page))
            tools += listed.tools
            if listed.nextCursor is None:
                return tools
            page = types.PaginatedRequestParams(cursor=listed.nextCursor)

    async def call(self, tool: str, arguments: JsonObject) -> Answer:
        """Call a tool. Raises ServiceUnavailableError if the connection breaks, UserCodeError if it is refused."""
        session = await self._open()
        params = types.CallToolRequestParams(name=tool, arguments={**arguments})
        # Not session.call_tool, which lists the server's tools once more per session.
        request = session.send_request(types.ClientRequest(types.CallToolRequest(params=params)), types.CallToolResult)
        try:
            result = await self._answered(request)
        except McpError as error:  # such as arguments that its schema refuses
            return Answer(f"error: {error}", is_error=True)
        return Answer(text_of(result), is_error=bool(result.isError))

    async def close(self) -> None:
        """End the session, and the process of a command; returns when that is gone."""
        if self._keeper is None:
            return
        self._over.set()
        if self._opened is not None and not self._opened.done():
            self._keeper.cancel()
        _, pending = await asyncio.wait([self._keeper], timeout=_END_SECONDS)
        if pending:  # such as a server that does not answer the end of its session
            self._keeper.cancel()
            await asyncio.wait([self._keeper], timeout=_CANCEL_SECONDS)

    async def _open(self) -> ClientSession:
        if self._keeper is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._opened))
        assert self._opened is not None
        waits: list[asyncio.Future[Any]] = [self._opened, self._keeper]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.is_lost:
            raise self._lost()
        return self._opened.result()

    async def _keep(self, opened: asyncio.Future[ClientSession]) -> None:
        try:
            async with self.server.connect() as session:
                await session.initialize()
                opened.set_result(session)
                await self._over.wait()
        except Exception as error:  # supervision point: raised to callers
            self._error = first_error(error)

    async def _answered(self, request: Coroutine[object, object, T]) -> T:
        """Await a request unless the connection breaks."""
        assert self._keeper is not None
        task = asyncio.ensure_future(request)
        try:
            await asyncio.wait([task, self._keeper], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._lost()
            return task.result()
        except (McpError, ClosedResourceError, BrokenResourceError) as error:
            if isinstance(error, McpError) and error.error.code not in _LOST:
                raise
            self._over.set()
            raise self._lost(error) from error
        finally:
            task.cancel()

    def _lost(self, error: BaseException | None = None) -> Exception:
        """The error of a connection that broke: the server's, unless it said that requests are not for it (4xx)."""
        error = error or self._error
        problem = f"the MCP server {self.server.name} {f'failed: {error!r}' if error else 'was closed'}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        refused = status is not None and error is not None and not is_outage(error)
        return UserCodeError(problem) if refused else ServiceUnavailableError(problem)


def text_of(result: types.CallToolResult) -> str:
    """The text of a tool's answer; other content is named instead, since models receive only text."""
    if not result.content and result.structuredContent is not None:
        return json.dumps(result.structuredContent, ensure_ascii=False)
    return "\n".join(map(_text, result.content))


def _text(part: types.ContentBlock) -> str:
    match part:
        case types.TextContent():
            return part.text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
            return text
        case types.ResourceLink():
            return str(part.uri)
    return f"[{part.type} left out: only text is supported]"
