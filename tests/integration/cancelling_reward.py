"""A reward that once cancels all tasks of its event loop."""

from __future__ import annotations

import asyncio

from miles_async.types import Prompt, Sample

_calls = 0


async def reward(prompt: Prompt, sample: Sample) -> float:
    """Share of the digits that are right, but for the tenth sample."""
    global _calls
    _calls += 1
    if _calls == 10:
        for task in asyncio.all_tasks():
            task.cancel()
    return sum(a == b for a, b in zip(sample.text, prompt.label, strict=False)) / len(prompt.label)
