"""A reward that takes its time, as tools, sandboxes and judges do: lognormal latency, σ = 1, median 0.2 s."""

from __future__ import annotations

import asyncio
import random

from miles_async.rewards.hub import exact_match
from miles_async.types import Prompt, Sample

MEDIAN_SECONDS = 0.2
SIGMA = 1.0

_latency = random.Random(0)


async def slow_exact_match(prompt: Prompt, sample: Sample) -> float:
    """``exact_match`` after a random wait."""
    await asyncio.sleep(MEDIAN_SECONDS * _latency.lognormvariate(0.0, SIGMA))
    return await exact_match(prompt, sample)
