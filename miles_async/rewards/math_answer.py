"""``math``: math-verify compares two mathematical answers.

It works in a worker process: its own time limit needs the main thread, and numbers like 10^(10^10) hold up an
interpreter where no signal can interrupt it.
"""

from __future__ import annotations

import logging

from miles_async.rewards.answers import answer_part, label_of
from miles_async.rewards.workers import WorkerPool
from miles_async.types import Prompt, Sample


class MathReward:
    r"""1 if the last answer in the response (in ``\boxed{}``, if there is one) equals the label, 0 if it doesn't.

    If equality cannot be decided, or not in time, that is a RewardError and not a 0.
    """

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        response, label = answer_part(sample.text), label_of(prompt)
        return float(await self._workers.call(is_right, response, label, needs=["math_verify"]))


def is_right(response: str, label: str) -> bool:
    """Compare in the worker. Raises what math-verify raises when it cannot decide."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    expected = parse(label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify finds no mathematics in the label {label!r}")
    found = parse(response, parsing_timeout=None)
    try:
        return bool(verify(expected, found, timeout_seconds=None, raise_on_error=True))
    except Exception:  # one way of comparing them fails; another one may still find them equal
        if verify(expected, found, timeout_seconds=None):
            return True
        raise
