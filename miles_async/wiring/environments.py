"""The environments of a run: the user's own or another package's, with the tools of MCP servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.api import Environment, MakeEnvironment
from miles_async.arguments.sessions import SessionsArguments, is_url, parse_environment, parse_environment_config
from miles_async.errors import ConfigurationError
from miles_async.integrations.generate_rows import generated_rows, rows_of
from miles_async.integrations.verifiers_episodes import HOST, VerifiersEpisodes, host_environment
from miles_async.rollout.agent_command import command_words
from miles_async.runtime.hooks import load_factory
from miles_async.runtime.network.keys import Secret
from miles_async.runtime.packages import require
from miles_async.types import JsonObject

if TYPE_CHECKING:
    from miles_async.wiring.engines import Service


@dataclass(frozen=True, slots=True)
class RunEnvironments:
    """How an episode's environment is made, and what has to be started for that."""

    make: MakeEnvironment
    services: Sequence[Service] = ()


def run_environments(sessions: SessionsArguments, log_dir: Path) -> RunEnvironments:
    """Load what the flags name and start nothing. Raises ConfigurationError."""
    own = _own_environment(sessions)
    if not sessions.mcp_server:
        assert own is not None
        return own
    _check_mcp(sessions)
    from miles_async.integrations.mcp_tools import MakeWithTools, McpServers  # here, since only such runs need the SDK

    servers = McpServers(
        sessions.mcp_server,
        shared=sessions.mcp_sessions == "run",
        start_timeout=sessions.environment_timeout,
        log_path=log_dir / "mcp-servers.log",
    )
    if own is None:
        return RunEnvironments(MakeWithTools(servers, None), [servers])
    return RunEnvironments(MakeWithTools(servers, own.make), [servers, *own.services])


def check_environments(sessions: SessionsArguments) -> None:
    """Check that everything named by the flags exists, starting nothing. Raises ConfigurationError. Other packages are
    not imported: the driver and its fork servers stay as they are.
    """
    if sessions.environment is not None:
        _parsed(sessions)
    else:
        _own_environment(sessions)
    if sessions.mcp_server:
        _check_mcp(sessions)


def try_environment(sessions: SessionsArguments) -> None:
    """Make the environment of Gymnasium once, which imports it: for the dry run. Raises ConfigurationError."""
    if sessions.environment is not None and _parsed(sessions)[0] == "gymnasium":
        try:
            _own_environment(sessions)
        except ConfigurationError as error:
            raise ConfigurationError(f"--environment {sessions.environment}: {error}") from error


def environment_rows(sessions: SessionsArguments, seed: int) -> list[JsonObject]:
    """Generate prompts of ``--environment``, held-out ones last. Raises ConfigurationError."""
    kind, name, config = _parsed(sessions)
    if kind == "verifiers":
        assert sessions.environment_python is not None
        python = str(Path(sessions.environment_python).absolute())
        counts = [str(sessions.environment_prompts), str(sessions.environment_eval_prompts)]
        words = [python, str(HOST), "rows", name, json.dumps(config), *counts]
        return rows_of(words, f"--environment {sessions.environment}", host_environment(python))
    count = sessions.environment_prompts + sessions.environment_eval_prompts
    return generated_rows(kind, name, config, count, seed)


def _parsed(sessions: SessionsArguments) -> tuple[str, str, Mapping[str, object]]:
    """Kind, name and settings of ``--environment``, whose package is installed. Raises ConfigurationError."""
    assert sessions.environment is not None
    kind, name = parse_environment(sessions.environment)
    if kind == "verifiers":
        python = sessions.environment_python or ""
        if shutil.which(python) is None:
            raise ConfigurationError(f"--environment-python {python}: there is no such program")
    elif kind in ("gymnasium", "reasoning_gym"):
        require(kind.replace("_", "-"), f"--environment {sessions.environment}")
    return kind, name, parse_environment_config(sessions.environment_config)


def verifiers_agent(sessions: SessionsArguments, api_key: Secret, log_dir: Path) -> VerifiersEpisodes:
    """The agent of ``--environment verifiers:NAME``, not started yet. Raises ConfigurationError."""
    assert sessions.environment_python is not None
    _, name, config = _parsed(sessions)
    return VerifiersEpisodes(
        str(Path(sessions.environment_python).absolute()),
        name,
        config,
        api_key=api_key,
        log_path=log_dir / "verifiers.log",
        start_timeout=sessions.agent_timeout,
    )


def _own_environment(sessions: SessionsArguments) -> RunEnvironments | None:
    """The environment without tools of MCP servers; None if there is none, or if it only has prompts."""
    if sessions.environment_path is not None:
        return RunEnvironments(
            load_factory(sessions.environment_path, MakeEnvironment, Environment, "--environment-path")
        )
    if sessions.environment is None:
        return None
    kind, name, config = _parsed(sessions)
    match kind:
        case "gymnasium":
            from miles_async.integrations.gymnasium_text import GymnasiumText

            return RunEnvironments(GymnasiumText(name, config))
        case "openenv":
            from miles_async.integrations.openenv_episodes import OpenEnv

            server = OpenEnv(name, config, answer_timeout=sessions.environment_timeout)
            return RunEnvironments(server, [server])
        case "nemo-gym":
            from miles_async.integrations.nemo_gym_episodes import NemoGym

            gym = NemoGym(name, answer_timeout=sessions.environment_timeout, max_turns=sessions.max_turns)
            return RunEnvironments(gym, [gym])
    return None


def _check_mcp(sessions: SessionsArguments) -> None:
    require("mcp", "--mcp-server", major="1.")
    for server in sessions.mcp_server:
        if not is_url(server):
            command_words(server, "--mcp-server")
