"""Tools of MCP servers: what the model is answered, whose fault a failure is, and that nothing is left of a server."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_async.errors import ConfigurationError, OverdueError, ServiceUnavailableError
from miles_async.integrations.mcp_tools import MakeWithTools, McpServers, WithTools
from miles_async.runtime.services import Circuit
from miles_async.types import Observation, Prompt
from tests.fakes import mcp_server
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.turns import calling
from tests.unit.rollout.test_multi_turn import ATTEMPT, Lookup, generate_with, says
from tests.unit.runtime.processes.waiting import gone
from tests.waiting import until

COMMAND = f"python {mcp_server.__file__}"
PROMPT = Prompt(prompt_id="p", token_ids=(1,), text="?")


def text(content: object = "") -> dict[str, str]:
    return {"text": str(content)}


@pytest.fixture
def pids(tmp_path: Path) -> Callable[[], list[int]]:
    """The processes of all servers that were started with ``started``."""
    return lambda: [int(line) for line in (tmp_path / "pids").read_text().split()]


@asynccontextmanager
async def started(tmp_path: Path, *, shared: bool = False, seconds: float = 20.0) -> AsyncIterator[McpServers]:
    servers = McpServers(
        [f"{COMMAND} {shlex.quote(str(tmp_path / 'pids'))}"],
        shared=shared,
        start_timeout=seconds,
        log_path=tmp_path / "logs" / "mcp.log",
    )
    await servers.start()
    try:
        yield servers
    finally:
        await servers.stop()


async def contents(environment: WithTools, *calls: tuple[str, object]) -> list[str]:
    return [message["content"] for message in (await environment.step(calling(*calls))).messages]


async def test_tools_are_listed_once_for_all_episodes(tmp_path: Path, pids: Callable[[], list[int]]) -> None:
    async with started(tmp_path) as servers:
        first, second = (MakeWithTools(servers, None)(PROMPT) for _ in range(2))
        assert [tool["function"]["name"] for tool in first.tools()] == [*mcp_server.TOOLS]
        assert first.tools()[0] == {
            "type": "function",
            "function": {"name": "echo", "description": "", "parameters": mcp_server.TEXT},
        }
        assert second.tools() == first.tools()
        (listing,) = pids()
        assert gone(listing)  # an episode that calls nothing starts no process
        await first.close()
    assert "an MCP server for tests" in (tmp_path / "logs" / "mcp.log").read_text()


async def test_calls_are_answered_in_order_by_a_session_of_the_episode(
    tmp_path: Path, pids: Callable[[], list[int]]
) -> None:
    async with started(tmp_path) as servers:
        one, other = (MakeWithTools(servers, None)(PROMPT) for _ in range(2))
        assert await contents(one, ("count", {}), ("echo", text("ünïcode")), ("count", {})) == ["1", "ünïcode", "2"]
        assert await contents(other, ("count", {})) == ["1"]
        observed = await one.step(calling(("count", {}), index=1))
        assert observed == Observation(
            messages=({"role": "tool", "content": "3", "tool_call_id": "call000"},),
            metrics={"tool_calls": 1, "tool_errors": 0},
        )
        assert await one.step(calling(index=2)) == Observation(done=True)  # the answer, for the run's reward
        _, *running = pids()
        assert len(running) == 2
        await one.close()
        await other.close()
        assert all(map(gone, running))


async def test_one_session_for_all_episodes_outlives_them(tmp_path: Path, pids: Callable[[], list[int]]) -> None:
    async with started(tmp_path, shared=True) as servers:
        one, other = (MakeWithTools(servers, None)(PROMPT) for _ in range(2))
        assert await contents(one, ("count", {})) == ["1"]
        await one.close()
        assert await contents(other, ("count", {})) == ["2"]
        with pytest.raises(ServiceUnavailableError, match="MCP server python"):
            await other.step(calling(("die", {})))
        assert await contents(other, ("count", {})) == ["1"]  # another process
        assert len(pids()) == 3
    assert all(map(gone, pids()))


async def test_what_the_model_did_wrong_is_told_to_the_model(tmp_path: Path) -> None:
    async with started(tmp_path) as servers:
        environment = MakeWithTools(servers, None)(PROMPT)
        observed = await environment.step(
            calling(("fail", {}), ("refuse", {}), ("nothing", {}), ("echo", "no object"), ("picture", {}))
        )
        assert [message["content"] for message in observed.messages] == [
            "division by zero",
            "error: unknown arguments",
            "error: there is no tool 'nothing'",
            "error: expected the arguments to be an object",
            "[image left out: only text is supported]",
        ]
        assert observed.metrics == {"tool_calls": 5, "tool_errors": 4}
        await environment.close()


async def test_what_a_server_asks_of_its_client_is_refused_by_name(tmp_path: Path) -> None:
    asked = ("sampling/createMessage", "elicitation/create", "roots/list")
    async with started(tmp_path) as servers:
        environment = MakeWithTools(servers, None)(PROMPT)
        told = await contents(environment, *(("ask", text(method)) for method in asked))
        assert told == [f"{what} not supported" for what in ("Sampling", "Elicitation", "List roots")]
        await environment.close()


async def test_a_megabyte_is_an_answer_and_ends_an_episode_that_has_no_room_for_it(tmp_path: Path) -> None:
    async with started(tmp_path) as servers:
        environment = MakeWithTools(servers, None)(PROMPT)
        (long,) = await contents(environment, ("repeat", text(1_000_000)))
        assert len(long) == 1_000_000
        await environment.close()
        sample = await generate_with(MakeWithTools(servers, None), step_timeout=20.0)(
            ScriptedModel(says(call_of("repeat", "1000000"))), ATTEMPT, 0
        )
        assert sample.finish_reason == "length"
        assert sample.metadata["turns"] == 1


async def test_a_server_that_dies_in_a_call_is_a_service_that_is_down(
    tmp_path: Path, pids: Callable[[], list[int]]
) -> None:
    async with started(tmp_path) as servers:
        environment = MakeWithTools(servers, None)(PROMPT)
        await contents(environment, ("count", {}))
        with pytest.raises(ServiceUnavailableError, match=r"the MCP server python .* failed: .*Connection closed"):
            await environment.step(calling(("die", {})))
        with pytest.raises(ServiceUnavailableError):  # what it kept of the episode is gone, so it is not asked again
            await environment.step(calling(("count", {}), index=1))
        await environment.close()
        assert len(pids()) == 2


async def test_an_episode_whose_server_dies_begins_again_with_another(tmp_path: Path) -> None:
    # covers: C6
    async with started(tmp_path) as servers:
        generate = generate_with(MakeWithTools(servers, None), step_timeout=20.0)
        model = ScriptedModel(says(call_of("die"), call_of("count"), "done"))
        circuit = Circuit("the MCP server")
        sample = await circuit.call(lambda: generate(model, ATTEMPT, 0))
        assert circuit.failures == 1
        assert [message["content"] for message in sample.metadata["messages"] if message["role"] == "tool"] == ["1"]


async def test_a_server_that_hangs_is_given_up_and_killed(tmp_path: Path, pids: Callable[[], list[int]]) -> None:
    async with started(tmp_path) as servers:
        generate = generate_with(MakeWithTools(servers, None), step_timeout=1.0)
        with pytest.raises(OverdueError, match="--environment-timeout 1 s"):
            await generate(ScriptedModel(says(call_of("hang"))), ATTEMPT, 0)
        await until(lambda: all(map(gone, pids())))


async def test_nothing_that_a_server_started_is_left(tmp_path: Path) -> None:
    async with started(tmp_path) as servers:
        environment = MakeWithTools(servers, None)(PROMPT)
        (child,) = await contents(environment, ("leave", {}))
        assert not gone(int(child))
        await environment.close()
        await until(lambda: gone(int(child)))


@pytest.mark.parametrize(
    ("command", "seconds", "problem"),
    [
        (f"{COMMAND} mute", 1.0, "found nothing within 1 s"),
        ("python -c pass", 60.0, "Connection closed"),
        ("http://127.0.0.1:9/mcp", 60.0, "ConnectError"),
    ],
)
async def test_a_server_that_lists_no_tools_is_refused_with_the_flag(
    tmp_path: Path, command: str, seconds: float, problem: str
) -> None:
    servers = McpServers([command], shared=False, start_timeout=seconds, log_path=tmp_path / "mcp.log")
    with pytest.raises(ConfigurationError, match=f"--mcp-server {command}: expected a server.*{problem}"):
        await servers.start()


async def test_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = [COMMAND, f"{COMMAND} {tmp_path / 'pids'}"]
    servers = McpServers(twice, shared=False, start_timeout=20.0, log_path=tmp_path / "mcp.log")
    with pytest.raises(ConfigurationError, match="its tool 'echo' is also one of python"):
        await servers.start()

    class Echoes(Lookup):
        def tools(self) -> Any:
            return [{"type": "function", "function": {"name": "echo"}}]

    async with started(tmp_path) as servers:
        with pytest.raises(ConfigurationError, match="the environment has a tool 'echo', too"):
            MakeWithTools(servers, Echoes)(PROMPT).tools()


async def test_an_environment_is_asked_about_everything_else(tmp_path: Path) -> None:
    async with started(tmp_path) as servers:
        environment = MakeWithTools(servers, Lookup)(PROMPT)
        inner = Lookup.made[-1]
        assert {"search", "echo"} <= {tool["function"]["name"] for tool in environment.tools()}
        await environment.step(calling(("echo", text("a"))))
        assert inner.turns == []
        observed = await environment.step(calling(("search", {"query": "b"}), ("echo", text("c")), index=1))
        assert [message["content"] for message in observed.messages] == ["68", "c"]
        assert observed.metrics == {"tool_calls": 1, "tool_errors": 0.5, "lookups": 1}
        assert [call["function"]["name"] for call in inner.turns[0].message["tool_calls"]] == ["search"]
        assert (await environment.step(calling(index=2))).done
        await environment.close()
        assert inner.closed == 1


def call_of(tool: str, argument: str = "") -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"text": "{argument}"}}}}\n</tool_call>'
