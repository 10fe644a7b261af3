"""What the log of the rollout side says of engines."""

from __future__ import annotations

from collections.abc import Mapping

EVENTS: Mapping[str, str] = {
    "engine is up": "serving",
    "restarting engine": "restarting",
    "engine given up": "given up",
    "draining engine": "draining",
    "engine is gone": "gone",
}
"""Message → state of its engine afterwards."""
