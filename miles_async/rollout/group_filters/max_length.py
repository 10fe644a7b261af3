"""Groups with a very long response."""

from __future__ import annotations

from miles_async.types import Group


class MaxLength:
    """``max_length:TOKENS``: a response is longer."""

    def __init__(self, tokens: float) -> None:
        self._tokens = tokens

    def __call__(self, group: Group) -> str | None:
        longest = max(sample.response_length for sample in group.samples)
        return f"max_length:{self._tokens:g}" if longest > self._tokens else None
