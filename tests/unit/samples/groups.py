"""Groups for tests of samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_async.staleness.versions import group_of
from miles_async.types import NO_VERSION, Attempt, Group, Prompt, Sample


def sample(text: str = "21", *, versions: tuple[int, ...] = (7, 8), **fields: object) -> Sample:
    """A sample whose prompt has 2 tokens, and its response one per version, all with loss."""
    count = len(versions)
    given = {"finish_reason": "stop", "reward": 1.0, **fields}
    return Sample(
        tokens=np.arange(2 + count, dtype=np.int32),
        prompt_length=2,
        loss_mask=np.array([0, 0] + [1] * count, np.uint8),
        rollout_logprobs=np.array([0, 0] + [-0.5] * count, np.float32),
        weight_versions=np.array([NO_VERSION] * 2 + list(versions), np.int32),
        text=text,
        **given,
    )


def group(attempt_id: int, *samples: Sample, messages: tuple[dict[str, object], ...] = ()) -> Group:
    """The group of an attempt at prompt ``train.jsonl:ID``."""
    prompt = Prompt(prompt_id=f"train.jsonl:{attempt_id}", token_ids=(0, 1), text="rev 12", messages=messages)
    return group_of(Attempt(attempt_id=attempt_id, prompt=prompt, epoch=0, issued_version=7), samples or [sample()])


def decode(tokens: Sequence[int]) -> str:
    """A letter per token."""
    return "".join(chr(97 + token) for token in tokens)
