"""Keys that hooks find in the environment of the rollout process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.wiring.rollout_process import hook_keys
from tests.fakes.keys import KEYS

# covers: C13

API, AGENTS = KEYS.engines.api.reveal(), KEYS.sessions.agents.reveal()


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """A run with frozen engines at port 8400."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[groups.train]\nengines = 1\n[groups.judge]\nrole = "frozen"\nport = 8400\n')
    return replace(Arguments(), engines=replace(Arguments().engines, server_groups=fleet))


def test_rewards_find_the_key_of_frozen_engines(arguments: Arguments) -> None:
    assert hook_keys(arguments, KEYS, {}) == {"MILES_ASYNC_API_KEY": API}


def test_an_agent_finds_the_key_of_sessions_and_no_other_of_them(arguments: Arguments) -> None:
    arguments = replace(arguments, sessions=replace(arguments.sessions, agent_path="m:solve"))
    found = hook_keys(arguments, KEYS, {"OPENAI_API_KEY": "of the user"})
    assert found["OPENAI_API_KEY"] == AGENTS
    assert not {KEYS.sessions.run.reveal(), KEYS.engines.admin.reveal()} & {*found.values()}


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://127.0.0.1:8400/v1", True),
        ("http://localhost:8400/v1", True),
        ("http://127.0.0.1:8401/v1", False),
        ("https://api.example:8400/v1", False),  # the run's key is nobody else's business
        ("http://127.0.0.1/v1", False),
        (None, False),
    ],
)
def test_a_judge_is_sent_the_key_if_it_is_the_runs_own(arguments: Arguments, url: str | None, own: bool) -> None:
    arguments = replace(arguments, rewards=replace(arguments.rewards, judge_url=url))
    assert hook_keys(arguments, KEYS, {}).get("JUDGE_API_KEY") == (API if own else None)
