"""The filters by name (``--group-filter``), and the one that users bring (``--group-filter-path``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles_async.api import GroupFilter
from miles_async.arguments.rewards import RewardArguments, parse_group_filters
from miles_async.rollout.group_filters.aborted import aborted
from miles_async.rollout.group_filters.max_length import MaxLength
from miles_async.rollout.group_filters.truncated import Truncated
from miles_async.rollout.group_filters.zero_variance import zero_variance
from miles_async.runtime.hooks import load_object
from miles_async.types import Group

GROUP_FILTERS: Mapping[str, GroupFilter] = {"zero_variance": zero_variance, "aborted": aborted}
NUMBERED_GROUP_FILTERS: Mapping[str, Callable[[float], GroupFilter]] = {"max_length": MaxLength, "truncated": Truncated}
"""Filters that are made with the number behind the colon."""


def group_filter(arguments: RewardArguments) -> GroupFilter | None:
    """The filters of this run as one, the user's own last; None if there are none. Raises ConfigurationError."""
    filters = [
        GROUP_FILTERS[name] if number is None else NUMBERED_GROUP_FILTERS[name](number)
        for name, number in parse_group_filters(arguments.group_filter)
    ]
    if arguments.group_filter_path is not None:
        filters.append(load_object(arguments.group_filter_path, GroupFilter, "--group-filter-path"))

    def first_reason(group: Group) -> str | None:
        return next((reason for each in filters if (reason := each(group)) is not None), None)

    return first_reason if filters else None
