"""``exact_match``: the response is the label."""

from __future__ import annotations

from miles_async.rewards.answers import label_of
from miles_async.types import Prompt, Sample


async def exact_match(prompt: Prompt, sample: Sample) -> float:
    """1 if the response ended by itself and is the label, up to white space around it; else 0.

    A response that was cut at ``--rollout-max-response-len`` is never right: a model that forgets to stop
    must not be paid. Raises RewardError when the prompt has no label.
    """
    return float(sample.finish_reason == "stop" and sample.text.strip() == label_of(prompt).strip())
