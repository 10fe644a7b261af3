"""Keys of the run's doors for hooks of the rollout process, which look for them in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import structlog

from miles_async.arguments import Arguments
from miles_async.arguments.server_groups import of_role, server_groups
from miles_async.rewards.judge import API_KEY as JUDGE_KEY_VARIABLE
from miles_async.runtime.network.addresses import LOOPBACK, Network
from miles_async.runtime.network.keys import API_KEY_VARIABLE, RunKeys

log = structlog.get_logger(__name__)

AGENT_KEY_VARIABLE = "OPENAI_API_KEY"  # where clients of chat completions look


def hook_keys(arguments: Arguments, keys: RunKeys, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to add to ``environment``: the key of frozen engines for rewards, that of sessions for agents."""
    found = {API_KEY_VARIABLE: keys.engines.api.reveal()}
    if arguments.sessions.agent_path is not None:
        found[AGENT_KEY_VARIABLE] = keys.sessions.agents.reveal()
        if AGENT_KEY_VARIABLE in environment:
            log.warning(f"{AGENT_KEY_VARIABLE} is replaced by the key of this run's sessions; use another for yours")
    if _is_frozen_group(arguments, arguments.rewards.judge_url):
        found[JUDGE_KEY_VARIABLE] = keys.engines.api.reveal()
    return found


def _is_frozen_group(arguments: Arguments, url: str | None) -> bool:
    """True if ``url`` is that of frozen engines of this run."""
    if url is None:
        return False
    ports = [group.port for group in of_role(server_groups(arguments), "frozen") if group.port is not None]
    here = {"localhost", LOOPBACK, Network.of_run(arguments.cluster).entrance()}
    asked = urlsplit(url)
    return asked.hostname in here and asked.port in ports
