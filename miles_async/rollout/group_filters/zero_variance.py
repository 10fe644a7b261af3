"""The dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from miles_async.types import Group

_EQUAL = 1e-9  # sums of the same parts may differ in the last digit


def zero_variance(group: Group) -> str | None:
    """``zero_variance``: all rewards are equal, so that comparing them teaches nothing."""
    rewards = [sample.reward or 0.0 for sample in group.samples]
    if max(rewards) - min(rewards) > _EQUAL:
        return None
    return {0.0: "zero_variance: all rewards 0", 1.0: "zero_variance: all rewards 1"}.get(rewards[0], "zero_variance")
