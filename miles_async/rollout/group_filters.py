"""Group filters (``--group-filter``): reasons not to train on a rewarded group, which a fresh prompt then replaces.

The ledger counts reasons, so they hold no numbers that differ from group to group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from miles_async.api import GroupFilter
from miles_async.arguments.rewards import RewardArguments, parse_group_filters
from miles_async.runtime.hooks import load_object
from miles_async.types import Group

_EQUAL = 1e-9  # sums of the same parts may differ in the last digit


def zero_variance(group: Group) -> str | None:
    """``zero_variance``: all rewards are equal, so that comparing them teaches nothing.

    The dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2).
    """
    rewards = [sample.reward or 0.0 for sample in group.samples]
    if max(rewards) - min(rewards) > _EQUAL:
        return None
    return {0.0: "zero_variance: all rewards 0", 1.0: "zero_variance: all rewards 1"}.get(rewards[0], "zero_variance")


def aborted(group: Group) -> str | None:
    """``aborted``: a response was aborted."""
    return "aborted" if any(sample.finish_reason == "abort" for sample in group.samples) else None


def max_length(tokens: float) -> GroupFilter:
    """``max_length:TOKENS``: a response is longer."""

    def reason(group: Group) -> str | None:
        longest = max(sample.longest_response for sample in group.samples)
        return f"max_length:{tokens:g}" if longest > tokens else None

    return reason


def truncated(fraction: float) -> GroupFilter:
    """``truncated:FRACTION``: a larger fraction of the responses met the length limit."""

    def reason(group: Group) -> str | None:
        cut = sum(sample.finish_reason == "length" for sample in group.samples)
        return f"truncated:{fraction:g}" if cut > fraction * len(group.samples) else None

    return reason


GROUP_FILTERS: Mapping[str, GroupFilter] = {"zero_variance": zero_variance, "aborted": aborted}
NUMBERED_GROUP_FILTERS: Mapping[str, Callable[[float], GroupFilter]] = {
    "max_length": max_length,
    "truncated": truncated,
}
"""Filters that are made with the number behind the colon."""


def group_filter(arguments: RewardArguments) -> GroupFilter | None:
    """The filters of this run as one, the user's own last; None if there are none. Raises ConfigurationError."""
    named = named_filter(arguments.group_filter)
    if arguments.group_filter_path is None:
        return named
    own = load_object(arguments.group_filter_path, GroupFilter, "--group-filter-path")
    return own if named is None else _first_reason([named, own])


def named_filter(words: Sequence[str]) -> GroupFilter | None:
    """The filters of ``--group-filter`` as one; None if there are none. Raises ConfigurationError."""
    filters = [
        GROUP_FILTERS[name] if number is None else NUMBERED_GROUP_FILTERS[name](number)
        for name, number in parse_group_filters(words)
    ]
    return _first_reason(filters) if filters else None


def _first_reason(filters: Sequence[GroupFilter]) -> GroupFilter:
    def reason(group: Group) -> str | None:
        return next((found for each in filters if (found := each(group)) is not None), None)

    return reason
