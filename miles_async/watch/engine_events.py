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
    """Seconds since 1970 of a line's timestamp; None if it is none."""
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return None
