"""A dry run says who rewards."""

from __future__ import annotations

import pytest

from miles_async.arguments.parser import assemble
from miles_async.runs.launch import summarize


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"rm_type": "math"}, "math"),
        ({"environment": "gymnasium:Blackjack-v1"}, "the environment's"),
        ({"agent_path": "my_agents:solve"}, "the agent's"),
        ({"mcp_server": ("tools",)}, "none"),  # a teacher's divergence alone is learned
    ],
)
def test_the_reward_is_named_or_who_gives_it(flags: dict[str, object], expected: str) -> None:
    (line,) = [line for line in summarize(assemble(flags, {}), {}).splitlines() if line.split()[0] == "reward"]
    assert line.split(maxsplit=1)[1] == expected
