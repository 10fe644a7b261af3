"""Admission: limits the attempts under way, so that the sweep finds nothing to do (C4)."""

from __future__ import annotations

from miles_async.errors import ConfigurationError, ContractViolation


class Admission:
    """Slots for attempts that are admitted and not yet trained; at most ``capacity`` = (K + 1) · B of them.

    A slot is taken at :meth:`admit`. An attempt that ends without being trained gives it back at once
    (:meth:`leave`); a trained one only when the version that its training leads to is visible
    (:meth:`trained`, then :meth:`commit`).

    Why then, and why this capacity: let v be the visible version when a group is admitted. Exactly the v
    batches trained from versions 0 .. v-1 have given their slots back, so all groups that are ahead of the
    new one and unfinished hold slots, and with its own there are at most (K + 1) · B. Taken oldest first, it
    is in one of the next K + 1 batches, trained from version v + K at the latest; its tokens are at least as
    new as v; so its age is at most K and nothing is swept. Had the batch trained from v given back its slots
    when the optimizer stepped rather than when v + 1 became visible, a group could enter under v as the first
    of batch v + K + 1: age K + 1, generated to be thrown away.

    It is pacing, not the guarantee: a group overtaken by faster ones can miss its batch. The cut
    sweeps those.
    """

    def __init__(self, capacity: int) -> None:
        self._untrained = 0
        self._trained: dict[int, int] = {}  # version that training leads to → groups that hold slots until then
        self._visible_version = 0
        self.resize(capacity)

    @property
    def capacity(self) -> int:
        """Total number of slots."""
        return self._capacity

    @property
    def occupied(self) -> int:
        """Slots taken: attempts not yet trained, and trained ones whose version is not visible yet."""
        return self._untrained + sum(self._trained.values())

    def room(self) -> int:
        """Attempts that may be admitted now; 0 while a lowered capacity is exceeded."""
        return max(0, self._capacity - self.occupied)

    def resize(self, capacity: int) -> None:
        """Change the capacity at run time. Attempts under way continue; admission waits until there is room.

        Raises:
            ConfigurationError: ``capacity`` is below 1, so nothing would ever be admitted.
        """
        if capacity < 1:
            raise ConfigurationError(f"expected room for at least 1 attempt, found {capacity}; see --max-rollout-lead")
        self._capacity = capacity

    def admit(self) -> None:
        """Take a slot. Ask :meth:`room` first.

        Raises:
            ContractViolation: no slot is free.
        """
        if self.room() == 0:
            raise ContractViolation(f"{self.occupied} attempts are admitted of at most {self._capacity}")
        self._untrained += 1

    def resume(self, count: int) -> None:
        """Take slots for attempts restored from a checkpoint, even beyond the capacity."""
        self._untrained += count

    def leave(self, count: int = 1) -> None:
        """Free the slots of attempts that ended untrained (failed, filtered, stale, ...)."""
        self._take_untrained(count)

    def trained(self, count: int, *, leads_to: int) -> None:
        """Note that the optimizer stepped with ``count`` groups; ``leads_to`` is the version that this leads to.

        That is the batch's target version + 1. Training can be ahead of publication, so it need not be the version
        after the visible one.
        """
        self._take_untrained(count)
        self._trained[leads_to] = self._trained.get(leads_to, 0) + count

    def commit(self, version: int) -> None:
        """Make ``version`` visible and free the slots of all groups whose training led up to it.

        Raises:
            ContractViolation: versions went backwards.
        """
        if version < self._visible_version:
            raise ContractViolation(f"version {version} became visible after version {self._visible_version}")
        self._visible_version = version
        self._trained = {made: count for made, count in self._trained.items() if made > version}

    def release(self) -> None:
        """Free the slots of all trained groups now.

        For a step that no publication follows (``--update-weights-interval`` above 1): waiting for one would
        fill the capacity and stop both sides. The proof holds with "batches released" in place of "v":
        versions advance by at most one per batch, so the next K + 1 batches span at most K versions.
        """
        self._trained.clear()

    def _take_untrained(self, count: int) -> None:
        if not 0 <= count <= self._untrained:
            raise ContractViolation(f"{count} attempts leave, but {self._untrained} are admitted and untrained")
        self._untrained -= count
