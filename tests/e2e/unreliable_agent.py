"""The black-box agent of the example, which now and then dies, or stops doing anything."""

from __future__ import annotations

import asyncio
import random

from examples.blackbox_agent.agent import solve as solve_reliably
from miles_async.types import Prompt

DIES, HANGS = 0.02, 0.005  # shares of trajectories


async def solve(base_url: str, prompt: Prompt) -> int:
    """As ``examples.blackbox_agent.agent.solve``, mostly."""
    chance = random.random()
    if chance < DIES:
        raise RuntimeError("the agent died")
    if chance < DIES + HANGS:
        await asyncio.sleep(3600)
    return await solve_reliably(base_url, prompt)
