"""Staleness: the age bound and the lead of rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from miles_async.arguments.flag import flag

DEFAULT_UNBOUNDED_LEAD = 3
"""Batches ahead when ages are not bounded: enough to hide one slow batch, and far from racing ahead."""

StaleGroupAction = Literal["recycle", "drop", "wait"]
BatchOrder = Literal["oldest_first", "completion", "reward_variance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessArguments:
    """Staleness"""

    max_weight_staleness: int | None = flag(
        None,
        "largest age, in weight versions, that is trained: version the optimizer steps from − oldest version among "
        "the sample's tokens that carry loss. Equal to the bound is fresh. none: ages are measured, not bounded",
        metavar="K",
        replaced_by=("on_policy",),
        at_least=0,
    )
    max_rollout_lead: int | None = flag(
        None,
        "batches that may be admitted and not yet trained. Default and maximum: K + 1 (if K is none: 3, and no "
        "maximum)",
        metavar="BATCHES",
        replaced_by=("on_policy",),
        at_least=1,
    )
    stale_group_action: StaleGroupAction = flag(
        "recycle",
        "action for a group that is too old at the cut. recycle: give its prompt another attempt; drop: take a fresh "
        "prompt; wait: prevent it, by delaying publications until the groups that they would make too old are trained",
        needs=("max_weight_staleness",),
        replaced_by=("on_policy",),
    )
    min_group_fraction: float = flag(
        1.0,
        "smallest fraction of --n-samples-per-prompt that a group is trained with: samples that are too old at the "
        "cut, or failed, are left out while that many remain. 1: all or nothing",
        metavar="FRACTION",
        above=0,
        at_most=1,
    )
    batch_order: BatchOrder = flag(
        "oldest_first",
        "groups that a batch takes first. oldest_first: by admission, which bounds ages with the least waste; "
        "completion: as they were completed, which favours short responses; reward_variance: groups whose rewards "
        "vary most; needs a bound, since other groups become too old, and a lead of several batches",
    )
    on_policy: bool = flag(
        False,
        "debug, slow: generate with the current weights, train and publish strictly in turn "
        "(--max-weight-staleness 0 --max-rollout-lead 1, regardless of these flags)",
    )

    @property
    def bound(self) -> int | None:
        """Oldest age that is trained: 0 with ``--on-policy``, None if not bounded."""
        return 0 if self.on_policy else self.max_weight_staleness

    @property
    def versions(self) -> int:
        """Versions that tokens of one batch may have, the newest included; 1 if ages are not bounded."""
        return 1 + (self.bound or 0)

    def min_samples(self, group_size: int) -> int:
        """Fewest samples that a group of ``group_size`` is trained with."""
        fraction = self.min_group_fraction if 0 < self.min_group_fraction <= 1 else 1.0  # which is refused elsewhere
        return max(1, math.ceil(round(fraction * group_size, 9)))

    @property
    def lead(self) -> int:
        """Batches that may be admitted and not yet trained; 1: strictly in turn."""
        if self.on_policy:
            return 1
        if self.max_rollout_lead is not None:
            return self.max_rollout_lead
        return DEFAULT_UNBOUNDED_LEAD if self.bound is None else self.bound + 1
