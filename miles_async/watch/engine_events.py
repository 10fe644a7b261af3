"""Events of engines in the rollout side's log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

EVENTS: Mapping[str, str] = {
    "engine is up": "serving",
    "restarting engine": "restarting",
    "engine given up": "given up",
    "draining engine": "draining",
    "engine is gone": "gone",
}
"""Message → state of its engine afterwards."""


def time_of(timestamp: object) -> float | None:
    """A line's timestamp in seconds since 1970; None if it has none."""
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return None
