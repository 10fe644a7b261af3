"""The pool of attempts: admission, buffer, ledger and attempt book moved together, one call per event.

Its owner (``rollout.dispatcher`` on an event loop, the property tests directly) calls one method per event, so that the
four parts cannot disagree: every ending is entered in the ledger, frees or keeps its slot, and decides what its prompt
gets. No waiting, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from miles_async.api import GroupFilter
from miles_async.errors import ContractViolation
from miles_async.staleness import events
from miles_async.staleness.admission import Admission
from miles_async.staleness.attempts import AttemptBook, BookState, Cause, DeadLetter, RetryPolicy, unissued
from miles_async.staleness.buffer import StalenessBuffer
from miles_async.staleness.events import PoolEvent, PoolObserver
from miles_async.staleness.ledger import Balance, Ledger, LedgerState, Outcome, Row, Stage
from miles_async.staleness.policy import StalenessPolicy, is_stale, is_tighter
from miles_async.types import Attempt, Changes, Group, Prompt

MOST_PASSED_OVER = 1_000
"""Quarantined prompts in a row after which the source is taken to have no others."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the pool, without its groups."""

    ledger: LedgerState
    book: BookState
    owed: tuple[Attempt, ...]  # for attempts in flight and prompts that were offered
    steps: int  # trained, over all processes of the run


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the pool, from which another process can continue (C9)."""

    state: PoolState
    groups: tuple[Group, ...]  # finished and not trained yet, oldest admission first


def without_quarantine(snapshot: PoolSnapshot) -> tuple[PoolSnapshot, list[str]]:
    """Return the snapshot with an empty quarantine, for changed prompt data, and the ids of the prompts in it."""
    state = snapshot.state
    book = msgspec.structs.replace(state.book, quarantined=())
    prompt_ids = [attempt.prompt.prompt_id for attempt in state.book.quarantined]
    return msgspec.structs.replace(snapshot, state=msgspec.structs.replace(state, book=book)), prompt_ids


class Pool:
    """Attempts from admission to their end."""

    def __init__(
        self,
        policy: StalenessPolicy,
        retries: RetryPolicy,
        *,
        total_groups: int | None = None,
        group_filter: GroupFilter | None = None,
        observers: Sequence[PoolObserver] = (),
    ) -> None:
        """``total_groups``: groups left to train; nothing is generated beyond them (R5, P6). None: no limit.
        ``group_filter``: asked about groups that lost stale samples. ``observers`` receive every event, such as the
        ledger on disk.
        """
        self._observers = observers
        self._admission = Admission(policy.capacity)
        self._policy = policy
        self._buffer = StalenessBuffer(
            policy.batch_size,
            policy.bound,
            order=policy.order,
            min_samples=policy.min_samples,
            group_filter=group_filter,
        )
        self._cut: dict[int, Group] = {}  # in a batch, not trained yet
        self._ledger = Ledger()
        self._book = AttemptBook(retries)
        self._total_groups = total_groups
        self._steps = 0  # trained, over all processes of the run
        self._live: dict[int, Attempt] = {}
        self._fresh: deque[tuple[int, Prompt]] = deque()
        self._reviewed_for = 0  # the newest version for which attempts in flight were ended as too old
        self._passed_over = 0  # offered prompts in a row that were quarantined
        self._visible_version: int | None = None  # None: no engine serves anything yet
        self.dead_letters: list[DeadLetter] = []  # quarantined by now; the pool's owner writes them out

    # -------------------------------------------------------------------------------------------- admission
    def room(self) -> int:
        """Attempts that may be issued now; none before the first version is visible."""
        if self._visible_version is None:
            return 0
        room = self._admission.room()
        if self._total_groups is None:
            return room
        return max(0, min(room, self._total_groups - self._ledger.trained - len(self._live)))

    def needs_prompt(self) -> bool:
        """Return whether :meth:`issue` lacks both a retry and an offered prompt."""
        return not self._book.waiting_retries and not self._fresh

    def offer(self, epoch: int, prompt: Prompt) -> None:
        """Offer a fresh prompt from the source; a quarantined one is skipped.

        Raises DataError if the source seems to have quarantined prompts only.
        """
        if self._book.admits(prompt):
            self._fresh.append((epoch, prompt))
            self._passed_over = 0
            return
        self._passed_over += 1
        # One epoch's end and the next one's start hold each twice, but a sampler may name it more often, and weights of
        # files may give many in a row from one of them.
        if self._passed_over > max(MOST_PASSED_OVER, 8 * len(self._book.dead_letters)):
            raise self._book.only_quarantined()

    def issue(self, visible_version: int) -> Attempt:
        """Admit one attempt: a retry if one waits, else an offered prompt. Ask room() and needs_prompt() first."""
        self._admission.admit()
        attempt = self._book.issue(self._fresh.popleft, visible_version)
        self._ledger.issue(attempt)
        self._live[attempt.attempt_id] = attempt
        self._emit(events.Issued(attempt))
        return attempt

    # ------------------------------------------------------------------------------------------ endings
    def finished(self, group: Group) -> None:
        """Put a generated and rewarded group into the buffer."""
        self._buffer.put(group)
        self._ledger.buffered(group.attempt.attempt_id)
        self._emit(events.Finished(group))

    def failed(self, attempt: Attempt, reason: str, *, infrastructure: bool) -> None:
        """End an attempt that produced no group. Raises DataError past ``--max-quarantined-prompts``."""
        self._end_untrained(attempt, Cause.INFRASTRUCTURE if infrastructure else Cause.DATA, reason)

    def filtered(self, attempt: Attempt, reason: str, group: Group | None = None) -> None:
        """End an attempt whose group a filter rejected."""
        if group is not None:
            self._emit(events.Finished(group))
        self._end_untrained(attempt, Cause.FILTERED, reason)

    def review(self, attempt_id: int, versions: Mapping[int, int | None], target_version: int) -> frozenset[int]:
        """Return the samples of an attempt in flight that are not worth finishing: every cut from now on is for
        ``target_version`` or a newer one (C1). These are all samples if too few would be left for a group (C7); the
        attempt has then ended as it would have at the cut. With ``--stale-group-action wait`` nothing is discarded.

        ``versions``: index of each sample that the group can have → an upper bound on its oldest version; None where
        nothing is certain.
        """
        if self._policy.action == "wait":
            return frozenset()
        bound = self._policy.bound
        known = {index: version for index, version in versions.items() if version is not None}
        too_old = frozenset(index for index, version in known.items() if is_stale(version, target_version, bound))
        fewest = self._policy.min_samples or len(versions)
        if len(versions) - len(too_old) >= fewest:
            return too_old
        self._reviewed_for = max(self._reviewed_for, target_version)
        reason = f"aborted at age {target_version - min(known.values())}"
        self._end_untrained(self._live[attempt_id], Cause.STALE, reason, target_version=target_version)
        return frozenset(versions)

    def cut(self, target_version: int) -> tuple[Group, ...] | None:
        """Cut one batch that is fresh for ``target_version`` (C1), or return None; stale groups leave either way.

        Raises ContractViolation for stale groups if the policy is to wait: ask :meth:`count_stale` first.
        """
        if self._policy.action == "wait" and (stale := self._buffer.count_stale(target_version)):
            raise ContractViolation(
                f"expected nothing to be too old with --stale-group-action wait, found {stale} buffered groups at "
                f"the cut for version {target_version}"
            )
        if target_version < self._reviewed_for:
            raise ContractViolation(
                f"a cut for version {target_version}, after attempts were ended as too old for {self._reviewed_for}"
            )
        groups, too_old, trimmed = self._buffer.cut(target_version)
        for event in trimmed:
            self._emit(event)
        for group in too_old:
            age = target_version - group.oldest_version
            self._end_untrained(group.attempt, Cause.STALE, f"age {age}", target_version=target_version)
        if not groups:
            return None
        attempt_ids = tuple(group.attempt.attempt_id for group in groups)
        self._ledger.cut(attempt_ids, target_version)
        self._cut.update(zip(attempt_ids, groups, strict=True))
        self._emit(events.Cut(attempt_ids, target_version))
        self.check()
        return groups

    def trained(self, groups: tuple[Group, ...], target_version: int) -> None:
        """End groups as trained from ``target_version``; their slots are freed at the next commit."""
        self._steps += 1
        for group in groups:
            self._ledger.end(group.attempt.attempt_id, Outcome.TRAINED)
            del self._live[group.attempt.attempt_id], self._cut[group.attempt.attempt_id]
            self._emit(events.Ended(group.attempt.attempt_id, Outcome.TRAINED, step=self._steps))
        self._admission.trained(len(groups), leads_to=target_version + 1)

    def commit(self, version: int) -> None:
        """Make ``version`` visible; the same version again means that the last step was not published."""
        if version == self._visible_version:
            self._admission.release()
        else:
            self._admission.commit(version)
            self._visible_version = version

    def change(self, changes: Changes) -> None:
        """Apply a changed bound and lead, if the changes include them. Call it between two cuts: each batch obeys
        the bound under which it was cut (C1).

        A lower bound makes buffered groups too old for the next cut, which sweeps them; with ``--stale-group-action
        wait``, which promises that nothing is swept, it cannot be lowered. Admission follows with the capacity (C4).
        """
        policy = self._policy
        bound, lead = changes.bound(policy.bound), changes.lead(policy.lead_batches)
        if policy.action == "wait" and is_tighter(bound, policy.bound):
            raise ContractViolation(f"--stale-group-action wait: the bound changes from {policy.bound} to {bound}")
        self._policy = replace(policy, bound=bound, lead_batches=lead)
        self._buffer.rebound(bound)
        self._admission.resize(self._policy.capacity)
        self._emit(events.Changed(changes))

    def count_stale(self, version: int) -> int:
        """Count attempts outside a batch that are too old for ``version``, or may be when they finish."""
        return self._buffer.count_stale(version) + len(self.in_doubt(version))

    def in_doubt(self, version: int) -> list[int]:
        """Return attempts in flight that were admitted under a version too old for ``version``."""
        return [
            row.attempt_id
            for row in self._ledger.live()
            if row.stage is Stage.IN_FLIGHT and is_stale(row.issued_version, version, self._policy.bound)
        ]

    def cancel_all(self) -> None:
        """End everything that is live as cancelled."""
        for attempt_id in list(self._live):
            self._ledger.end(attempt_id, Outcome.CANCELLED)
            self._emit(events.Ended(attempt_id, Outcome.CANCELLED))
        self._admission.leave(len(self._live))
        self._live.clear()

    # -------------------------------------------------------------------------------------------- inspection
    def check(self) -> None:
        """Check C2 against what the buffer really holds. Raises ContractViolation naming the rows."""
        self._ledger.check(group.attempt.attempt_id for group in self._buffer)
        stages = {row.attempt_id: row.stage for row in self._ledger.live()}
        if stages.keys() != self._live.keys():
            raise ContractViolation(
                f"the ledger and the pool disagree about {sorted(stages.keys() ^ self._live.keys())}"
            )
        self._emit(events.Checked(self._ledger.balance().issued, stages))

    def balance(self) -> Balance:
        """Attempts by stage and outcome."""
        return self._ledger.balance()

    def live(self) -> tuple[Row, ...]:
        """Attempts that have not ended, oldest admission first."""
        return self._ledger.live()

    def lead(self) -> int:
        """Attempts admitted and not yet trained (C4)."""
        return self._admission.occupied

    @property
    def capacity(self) -> int:
        """Attempts that may be admitted and not yet trained."""
        return self._admission.capacity

    def can_move(self) -> bool:
        """Return whether anything can happen without the trainer: an attempt is in flight or may be admitted."""
        return self.room() > 0 or self._ledger.in_flight > 0

    def describe(self) -> str:
        """Describe the pool in one line, for reports of a stall (C10)."""
        balance = self.balance()
        return (
            f"{balance.in_flight} attempts in flight, {balance.buffered} groups buffered, {balance.cut} cut, "
            f"room for {self.room()} more of {self._admission.capacity}, visible version {self._visible_version}"
        )

    # -------------------------------------------------------------------------------------------- checkpoint
    def snapshot(self) -> PoolSnapshot:
        """Snapshot the pool without copying tokens.

        Attempts in flight and offered prompts are saved as owed, to be issued again.
        """
        groups = {group.attempt.attempt_id: group for group in self._buffer} | self._cut
        owed = [unissued(attempt) for attempt_id, attempt in self._live.items() if attempt_id not in groups]
        owed += [Attempt(prompt=prompt, epoch=epoch) for epoch, prompt in self._fresh]
        return PoolSnapshot(
            state=PoolState(ledger=self._ledger.state(), book=self._book.state(), owed=tuple(owed), steps=self._steps),
            groups=tuple(groups[attempt_id] for attempt_id in sorted(groups)),
        )

    def restore(
        self,
        snapshot: PoolSnapshot,
        *,
        version: int,
        total_groups: int | None = None,
        readmissions: Mapping[str, Sequence[str]] | None = None,
        accepted: Sequence[str] = (),
    ) -> None:
        """Restore a snapshot; call it before anything is issued. ``total_groups``: groups left to train.

        ``version``: the version that the trainer continues from; groups that are too old for it are generated again,
        like samples that were in flight. ``readmissions``: request → ids of quarantined prompts to readmit.
        ``accepted``: changes of model and prompts that ``--load-anyway`` accepted, for the event.
        """
        state = snapshot.state
        kept: list[Group] = []
        too_old: list[Group] = []
        for group in snapshot.groups:
            stale = is_stale(group.oldest_version, version, self._policy.bound)
            (too_old if stale else kept).append(group)
        self._ledger.restore(state.ledger, kept={group.attempt.attempt_id for group in kept})
        self._steps = state.steps
        self._total_groups = None if total_groups is None else self._ledger.trained + total_groups
        owed = (*(unissued(group.attempt) for group in too_old), *state.owed)
        self._book.restore(msgspec.structs.replace(state.book, retries=(*owed, *state.book.retries)))
        for request_id, prompt_ids in (readmissions or {}).items():
            self._book.readmit(request_id, prompt_ids)
        balance = self.balance()
        earlier = msgspec.structs.replace(balance, issued=balance.issued - len(kept), buffered=0)
        self._emit(events.Restored(earlier, self._book.dead_letters, tuple(accepted)))
        self._admission.resume(len(kept))
        for group in kept:
            self._live[group.attempt.attempt_id] = group.attempt
            self._buffer.put(group)
            self._emit(events.Issued(group.attempt))
            self._emit(events.Finished(group))

    def _emit(self, event: PoolEvent) -> None:
        for observe in self._observers:
            observe(event)

    def _end_untrained(self, attempt: Attempt, cause: Cause, reason: str, *, target_version: int | None = None) -> None:
        outcome = self._book.ended(attempt, cause, reason)
        if outcome is Outcome.QUARANTINED:
            reason = f"{cause}: {reason}"
            prompt_id = attempt.prompt.prompt_id
            self.dead_letters.append(self._book.dead_letters[-1])
            self._fresh = deque(fresh for fresh in self._fresh if fresh[1].prompt_id != prompt_id)
        self._ledger.end(attempt.attempt_id, outcome, reason)
        self._emit(events.Ended(attempt.attempt_id, outcome, reason, target_version))
        del self._live[attempt.attempt_id]
        self._admission.leave()
