"""A TokenBatch by hand, for tests of losses: what isn't given is neutral."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles_async.api import TokenBatch


def token_batch(
    *,
    old: Sequence[float],
    advantages: Sequence[float],
    rollout: Sequence[float] | None = None,
    mask: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    ref_logprobs: Sequence[float] | None = None,
    teacher: Sequence[float] | None = None,
    per_token: bool = False,
) -> TokenBatch:
    """``rollout``: ``old`` unless given. ``lengths``: of the sequences; one by default."""
    count = len(old)
    offsets = torch.tensor([0, *(lengths or [count])]).cumsum(0)
    batch = TokenBatch(
        tokens=torch.zeros(count, dtype=torch.int64),
        offsets=offsets,
        loss_mask=torch.tensor(mask or [1.0] * count),
        advantages=torch.tensor(advantages),
        per_token=per_token,
        rewards=torch.zeros(len(offsets) - 1),
        group_ids=torch.arange(len(offsets) - 1),
        rollout_logprobs=torch.tensor(rollout or old),
        weight_versions=torch.zeros(count, dtype=torch.int64),
        oldest_versions=torch.zeros(count, dtype=torch.int64),
        target_version=0,
        computed={"old_logprobs": torch.tensor(old)},
    )
    if ref_logprobs is not None:
        batch = batch.with_computed("ref_logprobs", torch.tensor(ref_logprobs))
    return batch if teacher is None else batch.with_computed("teacher_logprobs", torch.tensor(teacher))
