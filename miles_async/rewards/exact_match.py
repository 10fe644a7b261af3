"""``exact_match``: the response is the label, or one of several."""

from __future__ import annotations

from miles_async.rewards.answers import labels_of
from miles_async.types import Prompt, Sample


async def exact_match(prompt: Prompt, sample: Sample) -> float:
    """1 if the response ended by itself and is the label, up to white space around it; else 0.

    A response that was cut at ``--rollout-max-response-len`` is never right: a model that forgets to stop
    must not be paid. Raises RewardError when the prompt has no label.
    """
    labels = [label.strip() for label in labels_of(prompt)]
    return float(sample.finish_reason == "stop" and sample.text.strip() in labels)
