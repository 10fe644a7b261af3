"""Certain facts about the versions of samples that are still being generated.

The oldest version among a sample's loss tokens decides its age, and is known for certain only when the sample is
finished. But any version that one of its loss tokens has for certain is a bound: the sample is at least that old.
"""

from __future__ import annotations

from collections.abc import Callable


class Beginnings:
    """By routing key, which every sample has one of: a version that its oldest loss token is not newer than.

    Two things are certain. Tokens that were kept have their labels (:meth:`note`). And the first token of an answer is
    never labelled newer than the version its request was dispatched under (``versions.parse_spans``), so a request
    tells its sample's bound from its dispatch on, where the answer is the sample's beginning (``dispatched``).
    """

    def __init__(self, dispatched: Callable[[str], int | None] = lambda key: None) -> None:
        """``dispatched``: the version that the request in flight of a routing key was dispatched under. Only where the
        first token of every answer carries loss: single-turn generation.
        """
        self._dispatched = dispatched
        self._versions: dict[str, int | None] = {}  # of watched samples

    def watch(self, key: str) -> None:
        """A sample begins, or begins again: nothing is known of it."""
        self._versions[key] = None

    def forget(self, key: str) -> None:
        """The sample failed or its group is over. No-op for one that is not watched."""
        self._versions.pop(key, None)

    def note(self, key: str, version: int) -> None:
        """A token of ``version`` was kept and carries loss. No-op for a sample that is not watched (evaluation)."""
        if key in self._versions:
            known = self._versions[key]
            self._versions[key] = version if known is None else min(known, version)

    def oldest(self, key: str) -> int | None:
        """The bound; None: the sample may turn out to be of any version."""
        if key not in self._versions:
            return None
        known = self._versions[key]
        return self._dispatched(key) if known is None else known
