"""Who looks on while the pool works: one method per thing that happens to an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.ledger import Balance, Outcome, Stage
from miles_async.types import Attempt, Group


class PoolObserver:
    """Called by the pool, on its thread, after each change. This one looks away.

    A method must not wait, raise or keep the pool from going on: ``ledger.writer`` queues what it is told.
    """

    def restored(self, balance: Balance, quarantined: Sequence[DeadLetter]) -> None:
        """A checkpoint was taken over: what earlier processes did. What is live of it follows as if issued now."""

    def issued(self, attempt: Attempt) -> None:
        """Admitted."""

    def finished(self, group: Group) -> None:
        """Generated and rewarded. It is in the buffer, or about to end as filtered."""

    def trimmed(self, group: Group, left_out: int) -> None:
        """At a cut, so many of its samples were too old; ``group`` is the rest, in the buffer (C7)."""

    def cut(self, attempt_ids: Sequence[int], target_version: int) -> None:
        """They left the buffer, for the batch that steps from ``target_version``."""

    def ended(
        self,
        attempt_id: int,
        outcome: Outcome,
        reason: str = "",
        *,
        target_version: int | None = None,
        step: int | None = None,
    ) -> None:
        """For ever. ``target_version``: that it was too old for. ``step``: which one trained it."""

    def checked(self, issued: int, live: Mapping[int, Stage]) -> None:
        """The pool has just checked C2: so many attempts were issued, and these have not ended."""
