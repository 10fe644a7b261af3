"""Tools of MCP servers in any environment, or alone (``--mcp-server``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from miles_async.api import Environment, MakeEnvironment
from miles_async.errors import ConfigurationError
from miles_async.integrations.mcp_session import McpServer, McpSession
from miles_async.integrations.tool_calls import Answer, answered, described
from miles_async.runtime.tasks import gathered
from miles_async.types import AssistantTurn, JsonObject, Observation, Prompt


class McpServers:
    """The servers of a run: their tools, listed once, and the sessions that all episodes share, if they do."""

    def __init__(self, servers: Sequence[str], *, shared: bool, start_timeout: float, log_path: Path) -> None:
        """``shared``: one session per server for the whole run instead of one per episode. ``start_timeout``: seconds
        for a server to list its tools.
        """
        self._servers = [McpServer(name, log_path) for name in servers]
        self._start_timeout = start_timeout
        self._is_shared = shared
        self._shared: dict[McpServer, McpSession] = {}
        self.server_of: dict[str, McpServer] = {}  # by name of the tool
        self.tools: list[JsonObject] = []  # as chat completions describe them

    async def start(self) -> None:
        """List the tools. Raises ConfigurationError for a server that has none, or whose tools have a name twice."""
        for server, tools in zip(self._servers, await gathered(*map(self._listed, self._servers)), strict=True):
            for tool in tools:
                name = tool["function"]["name"]
                if (other := self.server_of.get(name)) is not None:
                    raise ConfigurationError(
                        f"--mcp-server {server.name}: its tool {name!r} is also one of {other.name}, and calls name "
                        "the tool alone: leave one of them out"
                    )
                self.server_of[name] = server
                self.tools.append(tool)

    async def supervise(self) -> None:
        """Nothing to do: sessions that break are opened again by their next call."""

    async def stop(self) -> None:
        """End the sessions that are shared."""
        await gathered(*(session.close() for session in self._shared.values()))

    def session_for(self, tool: str, own: dict[McpServer, McpSession]) -> McpSession:
        """The session that answers calls of a tool. ``own``: the episode's sessions."""
        server = self.server_of[tool]
        sessions = self._shared if self._is_shared else own
        known = sessions.get(server)
        if known is None or (self._is_shared and known.is_lost):
            sessions[server] = known = McpSession(server)
        return known

    async def _listed(self, server: McpServer) -> list[JsonObject]:
        session = McpSession(server)
        try:
            async with asyncio.timeout(self._start_timeout):
                tools = await session.list_tools()
        except Exception as error:  # the server is third-party code: any error is shown with the flag
            reason = f"nothing within {self._start_timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            raise ConfigurationError(
                f"--mcp-server {server.name}: expected a server that lists its tools, found {reason} "
                f"({server.log_path} has what a command wrote)"
            ) from error
        finally:
            await session.close()
        if not tools:
            raise ConfigurationError(f"--mcp-server {server.name}: expected a server with tools, found none")
        return [described(tool.name, tool.description, tool.inputSchema) for tool in tools]


@dataclass(frozen=True, slots=True)
class MakeWithTools:
    """A MakeEnvironment whose environments have the servers' tools, too."""

    servers: McpServers
    make_environment: MakeEnvironment | None  # None: the first turn without a call is the answer

    def __call__(self, prompt: Prompt) -> Environment:
        return WithTools(self.servers, self.make_environment(prompt) if self.make_environment else None)


@dataclass(slots=True)
class WithTools:
    """An environment whose model may call tools of MCP servers. Turns with such calls alone are answered here."""

    servers: McpServers
    inner: Environment | None
    _sessions: dict[McpServer, McpSession] = field(default_factory=dict)

    def tools(self) -> Sequence[JsonObject]:
        """All tools. Raises ConfigurationError if one of the environment's has the name of a server's."""
        own = list(self.inner.tools()) if self.inner else []
        for name in [str(tool.get("function", {}).get("name")) for tool in own]:
            if name in self.servers.server_of:
                raise ConfigurationError(
                    f"--mcp-server: the environment has a tool {name!r}, too: leave one of them out"
                )
        return [*own, *self.servers.tools]

    async def step(self, turn: AssistantTurn) -> Observation:
        """Answer calls of the servers' tools; the environment has the others, and turns without any."""
        calls: Sequence[JsonObject] = turn.message.get("tool_calls", ())
        taken = [call for call in calls if self.inner is None or call["function"]["name"] in self.servers.server_of]
        if not taken:
            return await self.inner.step(turn) if self.inner else Observation(done=True)
        messages, metrics, _ = await answered(taken, self._answer)
        left = [call for call in calls if call not in taken]
        if self.inner is None or not left:
            return Observation(messages=tuple(messages), metrics=metrics)
        message = {**turn.message, "tool_calls": left}
        observed = await self.inner.step(msgspec.structs.replace(turn, message=message))
        order = {call["id"]: number for number, call in enumerate(calls)}  # templates may write results without ids
        both = sorted((*messages, *observed.messages), key=lambda each: order.get(each.get("tool_call_id"), len(calls)))
        return msgspec.structs.replace(observed, messages=tuple(both), metrics=_added(metrics, observed.metrics))

    async def close(self) -> None:
        """Close the environment and the episode's sessions, even if closing one fails."""
        closing = [session.close() for session in self._sessions.values()]
        if self.inner:
            closing.append(self.inner.close())
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _answer(self, tool: str, arguments: JsonObject) -> Answer:
        if tool not in self.servers.server_of:
            return Answer(f"error: there is no tool {tool!r}", is_error=True)
        return await self.servers.session_for(tool, self._sessions).call(tool, arguments)


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
