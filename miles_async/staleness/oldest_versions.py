"""Certain bounds on the versions of samples that are still being generated.

The oldest version among a sample's loss tokens decides its age, and is known for certain only when the sample is
finished. But any version that one of its loss tokens has for certain is a bound: the sample is at least that old.
"""

from __future__ import annotations

from collections.abc import Callable


class OldestVersions:
    """Upper bounds on the oldest version of samples in flight, by routing key (one per sample).

    Two things are certain. Tokens that were kept have their labels (:meth:`note`). And the first token of an answer is
    never labelled newer than the version its request was dispatched under (``versions.parse_spans``), so a request
    gives its sample's bound from its dispatch on, if its answer is the beginning of the sample (``dispatched``).
    """

    def __init__(self, dispatched: Callable[[str], int | None] = lambda key: None) -> None:
        """``dispatched``: routing key → version under which its request in flight was dispatched. Pass it only if the
        first token of every answer carries loss, as in single-turn generation.
        """
        self._dispatched = dispatched
        self._versions: dict[str, int | None] = {}  # of watched samples

    def watch(self, key: str) -> None:
        """Begin to watch a sample, or watch it from the start again: nothing is known about it."""
        self._versions[key] = None

    def forget(self, key: str) -> None:
        """Stop watching a sample that failed or whose group ended. No-op for one that is not watched."""
        self._versions.pop(key, None)

    def note(self, key: str, version: int) -> None:
        """Note a kept token of ``version`` that carries loss. No-op for a sample that is not watched (evaluation)."""
        if key in self._versions:
            known = self._versions[key]
            self._versions[key] = version if known is None else min(known, version)

    def oldest(self, key: str) -> int | None:
        """Return the bound of a sample; None if it may still be of any version."""
        if key not in self._versions:
            return None
        known = self._versions[key]
        return self._dispatched(key) if known is None else known
