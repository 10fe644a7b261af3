"""The flags of a run as one table, for trackers that keep them without groups."""

from __future__ import annotations

from collections.abc import Mapping

Settings = Mapping[str, object]
"""Flags by group."""


def flat_settings(settings: Settings) -> dict[str, str]:
    """Values of flags by their names, as text.

    >>> flat_settings({"optimizer": {"lr": 1e-6}})
    {'lr': '1e-06'}
    """
    groups = [group for group in settings.values() if isinstance(group, Mapping)]
    return {str(name): str(value) for group in groups for name, value in group.items()}
