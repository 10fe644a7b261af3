"""Groups that an engine did not finish."""

from __future__ import annotations

from miles_async.types import Group


def aborted(group: Group) -> str | None:
    """``aborted``: a response was aborted."""
    return "aborted" if any(sample.finish_reason == "abort" for sample in group.samples) else None
