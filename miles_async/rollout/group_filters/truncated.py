"""Groups whose responses met the length limit."""

from __future__ import annotations

from miles_async.types import Group


class Truncated:
    """``truncated:FRACTION``: a larger fraction of the responses met the length limit."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def __call__(self, group: Group) -> str | None:
        cut = sum(sample.finish_reason == "length" for sample in group.samples)
        return f"truncated:{self._fraction:g}" if cut > self._fraction * len(group.samples) else None
