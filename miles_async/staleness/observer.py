"""Observers of the pool: one method per event in the life of an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.ledger import Balance, Outcome, Stage
from miles_async.types import Attempt, Group


class PoolObserver:
    """Receives pool events, on the pool's thread, after each change. This one ignores them.

    Methods must not wait or raise; ``ledger.writer`` queues what it receives.
    """

    def restored(self, balance: Balance, quarantined: Sequence[DeadLetter]) -> None:
        """The pool was restored: ``balance`` of earlier processes. Live attempts follow as if issued now."""

    def issued(self, attempt: Attempt) -> None:
        """The attempt was admitted."""

    def finished(self, group: Group) -> None:
        """The group was generated and rewarded. It is in the buffer, or about to end as filtered."""

    def trimmed(self, group: Group, left_out: int) -> None:
        """A cut removed ``left_out`` samples that were too old; ``group`` is the rest, in the buffer (C7)."""

    def cut(self, attempt_ids: Sequence[int], target_version: int) -> None:
        """The attempts left the buffer for the batch that steps from ``target_version``."""

    def ended(
        self,
        attempt_id: int,
        outcome: Outcome,
        reason: str = "",
        *,
        target_version: int | None = None,
        step: int | None = None,
    ) -> None:
        """The attempt ended. ``target_version``: the version it was too old for. ``step``: the one that trained it."""

    def checked(self, issued: int, live: Mapping[int, Stage]) -> None:
        """The pool has just checked C2: ``issued`` attempts in all, of which ``live`` have not ended."""
