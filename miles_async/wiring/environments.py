"""The environments of a run: the user's own and those of other packages, with the tools of MCP servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.api import Environment, MakeEnvironment
from miles_async.arguments.sessions import SessionsArguments, is_url
from miles_async.integrations.packages import require
from miles_async.rollout.agent_command import command_words
from miles_async.runtime.hooks import load_factory

if TYPE_CHECKING:
    from miles_async.wiring.engines import Service


@dataclass(frozen=True, slots=True)
class RunEnvironments:
    """How an episode's environment is made, and what has to be started for that."""

    make: MakeEnvironment
    services: Sequence[Service] = ()


def run_environments(sessions: SessionsArguments, log_dir: Path) -> RunEnvironments:
    """Load what the flags name and start nothing. Raises ConfigurationError."""
    make = _own_environment(sessions)
    if not sessions.mcp_server:
        assert make is not None
        return RunEnvironments(make)
    _check_mcp(sessions)
    from miles_async.integrations.mcp_tools import MakeWithTools, McpServers  # here, since only such runs need the SDK

    servers = McpServers(
        sessions.mcp_server,
        shared=sessions.mcp_sessions == "run",
        start_timeout=sessions.environment_timeout,
        log_path=log_dir / "mcp-servers.log",
    )
    return RunEnvironments(MakeWithTools(servers, make), [servers])


def check_environments(sessions: SessionsArguments) -> None:
    """Check that what the flags name is here, starting nothing. Raises ConfigurationError."""
    _own_environment(sessions)
    if sessions.mcp_server:
        _check_mcp(sessions)


def _own_environment(sessions: SessionsArguments) -> MakeEnvironment | None:
    if sessions.environment_path is None:
        return None
    return load_factory(sessions.environment_path, MakeEnvironment, Environment, "--environment-path")


def _check_mcp(sessions: SessionsArguments) -> None:
    require("mcp", "--mcp-server", major="1.")
    for server in sessions.mcp_server:
        if not is_url(server):
            command_words(server, "--mcp-server")
