"""``format``: the response matches ``--rm-format``."""

from __future__ import annotations

import re

from miles_async.rewards.workers import WorkerPool
from miles_async.types import Prompt, Sample


class FormatReward:
    """1 if the whole response matches, up to white space around it, else 0."""

    def __init__(self, workers: WorkerPool, pattern: str) -> None:
        """``pattern``: a regular expression whose dots match line ends too."""
        self._workers = workers
        self._pattern = pattern

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        return float(await self._workers.call(matches, self._pattern, sample.text.strip()))


def matches(pattern: str, text: str) -> bool:
    """Match in the worker, since some patterns never finish on some texts."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None
