"""Checks of the flags that say where trajectories come from: environments, agents, tools and parsers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.problems import refusal
from miles_async.arguments.sessions import (
    AUTO,
    REASONING_PARSERS,
    is_url,
    parse_environment,
    parse_environment_config,
)
from miles_async.arguments.words import did_you_mean


def check_trajectories(arguments: Arguments) -> Iterator[str]:
    """Check that trajectories have one source and a known parser, and multi-turn ones a chat template."""
    sessions = arguments.sessions
    parser, known = sessions.reasoning_parser, (AUTO, "think", *REASONING_PARSERS)
    if parser is not None and parser not in known:
        yield f"--reasoning-parser {parser}: expected one of {', '.join(known)}{did_you_mean(parser, known)}"
    if sessions.environment is not None:
        environment, config = sessions.environment, sessions.environment_config
        yield from refusal(lambda: parse_environment(environment))
        yield from refusal(lambda: parse_environment_config(config))
        if sessions.plays_verifiers and sessions.environment_python is None:
            yield (
                f"--environment {environment}: verifiers and SGLang need different versions of openai. Install it in "
                "a separate Python (python3 -m venv verifiers; verifiers/bin/pip install 'verifiers>=0.4,<0.5' uv) "
                "and give --environment-python verifiers/bin/python"
            )
        if sessions.plays_verifiers and sessions.mcp_server:
            yield "--mcp-server with --environment verifiers:..., which calls tools itself: connect them there"
    given = list(arguments.trajectory_origins)
    if len(given) > 1:
        yield f"{' and '.join(given)} each make trajectories: give one of them"
    if sessions.mcp_server and given not in ([], ["--environment"], ["--environment-path"]):
        yield f"--mcp-server with {given[0]}, which calls tools itself: connect them there"
    given = given or ["--mcp-server"]
    if sessions.is_multi_turn and not arguments.data.apply_chat_template:
        yield f"{given[0]} needs the chat template between turns: leave --no-apply-chat-template out"
    if sessions.agent_command is not None:
        yield from _command_problems("--agent-command", sessions.agent_command)
    for server in sessions.mcp_server:
        if not is_url(server):
            yield from _command_problems("--mcp-server", server)
    if twice := {server for server in sessions.mcp_server if sessions.mcp_server.count(server) > 1}:
        yield f"--mcp-server {min(twice)} is given twice: its tools would have one name each twice"


def _command_problems(flag: str, command: str) -> Iterator[str]:
    try:
        if not shlex.split(command):
            yield f"{flag} is empty: expected a command"
    except ValueError as error:  # a quotation that does not end
        yield f"{flag} {command}: expected a command as a shell splits it: {error}"
