"""The group filters that come with the project, by the names of ``--group-filter``.

A filter says why a rewarded group is not trained. The reason is what the ledger counts, so it holds no numbers that
differ from group to group. What was filtered is replaced by a fresh prompt: zero_variance is the dynamic sampling of
DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles_async.api import GroupFilter
from miles_async.arguments.rewards import RewardArguments, parse_group_filters
from miles_async.runtime.hooks import load_object
from miles_async.types import Group

_EQUAL = 1e-9  # rewards that differ by less teach nothing: sums of the same parts may differ in the last digit


def resolve_group_filter(arguments: RewardArguments) -> GroupFilter | None:
    """The filters of this run as one, the user's own last; None if there are none. Raises ConfigurationError."""
    named = parse_group_filters(arguments.group_filter)
    own: GroupFilter | None = None
    if arguments.group_filter_path is not None:
        own = load_object(arguments.group_filter_path, GroupFilter, "--group-filter-path")

    def group_filter(group: Group) -> str | None:
        for name, number in named:
            if (reason := _FILTERS[name](group, number or 0.0)) is not None:
                return reason
        return own(group) if own is not None else None

    return group_filter if named or own is not None else None


def _zero_variance(group: Group, _: float) -> str | None:
    rewards = [sample.reward or 0.0 for sample in group.samples]
    if max(rewards) - min(rewards) > _EQUAL:
        return None
    return {0.0: "zero_variance: all rewards 0", 1.0: "zero_variance: all rewards 1"}.get(rewards[0], "zero_variance")


def _aborted(group: Group, _: float) -> str | None:
    return "aborted" if any(sample.finish_reason == "abort" for sample in group.samples) else None


def _max_length(group: Group, tokens: float) -> str | None:
    longest = max(len(sample.tokens) - sample.prompt_length for sample in group.samples)
    return f"max_length:{tokens:g}" if longest > tokens else None


def _truncated(group: Group, fraction: float) -> str | None:
    cut = sum(sample.finish_reason == "length" for sample in group.samples)
    return f"truncated:{fraction:g}" if cut > fraction * len(group.samples) else None


_FILTERS: Mapping[str, Callable[[Group, float], str | None]] = {
    "zero_variance": _zero_variance,
    "aborted": _aborted,
    "max_length": _max_length,
    "truncated": _truncated,
}
