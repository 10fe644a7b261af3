"""Conservation (C2): every issued attempt ends exactly once, and at any step nothing is missing.

``issued = in flight + buffered + cut + ended``. In memory: one row per live attempt, counters for ended ones.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from miles_async.errors import ContractViolation
from miles_async.types import Attempt


class Stage(enum.StrEnum):
    """Stage of a live attempt; it only moves forward: in flight → buffered → cut."""

    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    CUT = "cut"  # in a batch that is prepared or being trained


class Outcome(enum.StrEnum):
    """Outcome of an attempt that ended."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE_RECYCLED = "stale_recycled"  # its prompt gets another attempt
    STALE_DROPPED = "stale_dropped"  # a fresh prompt takes its place
    FAILED = "failed"
    QUARANTINED = "quarantined"  # its prompt gets no more attempts
    CANCELLED = "cancelled"  # the run ended first


ENDS_FROM: Mapping[Outcome, Collection[Stage]] = {
    Outcome.TRAINED: {Stage.CUT},
    Outcome.FILTERED: {Stage.IN_FLIGHT},
    Outcome.STALE_RECYCLED: {Stage.IN_FLIGHT, Stage.BUFFERED},
    Outcome.STALE_DROPPED: {Stage.IN_FLIGHT, Stage.BUFFERED},
    Outcome.FAILED: {Stage.IN_FLIGHT},
    Outcome.QUARANTINED: {Stage.IN_FLIGHT},
    Outcome.CANCELLED: set(Stage),
}
"""Stages that each outcome may follow: only cut groups are trained, and cut groups are never too old."""


STALE = frozenset({Outcome.STALE_RECYCLED, Outcome.STALE_DROPPED})
"""Too old to be trained, swept at a cut or aborted before."""


MOST_REASONS = 1_000
"""Reasons that are counted one by one: errors may all differ, in runs of months."""

OTHER_REASONS = "other reasons"


class Row(msgspec.Struct, kw_only=True):
    """One live attempt."""

    attempt_id: int
    prompt_id: str
    stage: Stage = Stage.IN_FLIGHT
    issued_version: int
    target_version: int | None = None  # of the cut


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and live rows at one moment, for a checkpoint."""

    issued: int
    last_id: int
    ended: Mapping[Outcome, int]
    reasons: Mapping[str, int]  # "outcome: reason" → attempts
    aborted: int
    live: tuple[Row, ...]  # oldest admission first


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger in numbers."""

    issued: int
    in_flight: int
    buffered: int
    cut: int
    ended: Mapping[str, int]  # every Outcome, 0 too
    reasons: Mapping[str, int]  # "outcome: reason" → attempts
    aborted: int  # ended as too old while they were generated

    @classmethod
    def of(
        cls,
        issued: int,
        stages: Mapping[Stage, int],
        ended: Mapping[Outcome, int],
        reasons: Mapping[str, int],
        aborted: int,
    ) -> Balance:
        """``stages``, ``ended``: attempts, 0 where absent."""
        return cls(
            issued=issued,
            in_flight=stages.get(Stage.IN_FLIGHT, 0),
            buffered=stages.get(Stage.BUFFERED, 0),
            cut=stages.get(Stage.CUT, 0),
            ended={outcome: ended.get(outcome, 0) for outcome in Outcome},
            reasons=dict(reasons),
            aborted=aborted,
        )

    def summary(self) -> dict[str, int]:
        """The ``groups`` of summary.json: ``issued`` is the sum of all the others."""
        ended = dict(self.ended)
        return {
            "issued": self.issued,
            "recycled": ended.pop(Outcome.STALE_RECYCLED),
            "dropped": ended.pop(Outcome.STALE_DROPPED),
            **{str(outcome): count for outcome, count in ended.items()},
            "in_flight": self.in_flight,
            "buffered": self.buffered,
            "cut": self.cut,
        }

    def ended_since(self, earlier: Balance) -> dict[str, int]:
        """Attempts that ended untrained since ``earlier``, by outcome, 0 too. ``stale``: recycled or dropped;
        ``aborted``: of these, while they were generated.
        """
        ended = {outcome: self.ended[outcome] - earlier.ended[outcome] for outcome in Outcome}
        recycled, dropped = ended[Outcome.STALE_RECYCLED], ended[Outcome.STALE_DROPPED]
        return {
            "stale": recycled + dropped,
            "aborted": self.aborted - earlier.aborted,
            "recycled": recycled,
            "dropped": dropped,
            "filtered": ended[Outcome.FILTERED],
            "failed": ended[Outcome.FAILED],
            "quarantined": ended[Outcome.QUARANTINED],
        }


class Ledger:
    """One row per live attempt; rejects every move that would lose or duplicate one."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._stages: Counter[Stage] = Counter()
        self._issued = 0
        self._last_id = -1
        self._ended: Counter[Outcome] = Counter()
        self._reasons: Counter[str] = Counter()
        self._aborted = 0

    def issue(self, attempt: Attempt) -> None:
        """An attempt was admitted. Ids must rise, so that none is ever reused.

        Raises:
            ContractViolation: the id is not above all earlier ones.
        """
        if attempt.attempt_id <= self._last_id:
            raise ContractViolation(
                f"expected an attempt id above {self._last_id}, found {attempt.attempt_id} "
                f"(prompt {attempt.prompt.prompt_id!r})"
            )
        self._rows[attempt.attempt_id] = Row(
            attempt_id=attempt.attempt_id,
            prompt_id=attempt.prompt.prompt_id,
            issued_version=attempt.issued_version,
        )
        self._last_id = attempt.attempt_id
        self._issued += 1
        self._stages[Stage.IN_FLIGHT] += 1

    def buffered(self, attempt_id: int) -> None:
        """Move an attempt to the buffer: its group is finished and rewarded."""
        self._move(self._live([attempt_id]), Stage.IN_FLIGHT, Stage.BUFFERED)

    def cut(self, attempt_ids: Iterable[int], target_version: int) -> None:
        """Move attempts from the buffer to the batch that steps from ``target_version``."""
        rows = self._live(attempt_ids)
        self._move(rows, Stage.BUFFERED, Stage.CUT)
        for row in rows:
            row.target_version = target_version

    def end(self, attempt_id: int, outcome: Outcome, reason: str = "") -> None:
        """End an attempt. This is final.

        Raises:
            ContractViolation: it is not live (ended, or never issued), or this outcome cannot follow its stage.
        """
        (row,) = self._live([attempt_id])
        if row.stage not in ENDS_FROM[outcome]:
            raise ContractViolation(f"cannot end as {outcome} from {row.stage}: {row}")
        del self._rows[attempt_id]
        self._stages[row.stage] -= 1
        self._ended[outcome] += 1
        self._aborted += outcome in STALE and row.stage is Stage.IN_FLIGHT
        if reason:
            self._count_reason(f"{outcome}: {reason}", f"{outcome}: {OTHER_REASONS}")

    @property
    def in_flight(self) -> int:
        """Attempts that are being generated or rewarded."""
        return self._stages[Stage.IN_FLIGHT]

    @property
    def trained(self) -> int:
        """Attempts that ended as trained, over all processes of the run."""
        return self._ended[Outcome.TRAINED]

    def live(self) -> tuple[Row, ...]:
        """The live rows, oldest admission first; for dumps of the state (C10)."""
        return tuple(self._rows.values())

    def balance(self) -> Balance:
        """Current counts of attempts by stage and outcome."""
        return Balance.of(self._issued, self._stages, self._ended, self._reasons, self._aborted)

    def check(self, buffered: Iterable[int]) -> None:
        """Check C2 at run time: the sum, and the rows against ``buffered``, the attempt ids in the buffer.

        Raises:
            ContractViolation: names the rows that the ledger and the buffer disagree about.
        """
        balance, rows = self.balance(), self._rows.values()
        accounted = balance.in_flight + balance.buffered + balance.cut + sum(balance.ended.values())
        if balance.issued != accounted or len(rows) != sum(self._stages.values()):
            raise ContractViolation(f"issued ≠ in flight + buffered + cut + ended: {balance}; live: {self.live()}")
        expected, found = {row.attempt_id for row in rows if row.stage is Stage.BUFFERED}, set(buffered)
        if expected != found:
            raise ContractViolation(
                "attempts that are buffered in the ledger and nowhere else: "
                f"{[self._rows[i] for i in sorted(expected - found)]}; held as buffered but not in the "
                f"ledger: {[self._rows.get(i, i) for i in sorted(found - expected)]}"
            )

    def state(self) -> LedgerState:
        return LedgerState(
            issued=self._issued,
            last_id=self._last_id,
            ended=dict(self._ended),
            reasons=dict(self._reasons),
            aborted=self._aborted,
            live=tuple(map(msgspec.structs.replace, self._rows.values())),  # copies: rows change
        )

    @staticmethod
    def saved_balance(state: LedgerState) -> Balance:
        """Return the balance at the moment when ``state`` was saved."""
        stages = Counter(row.stage for row in state.live)
        return Balance.of(state.issued, stages, state.ended, state.reasons, state.aborted)

    def restore(self, state: LedgerState, *, kept: Collection[int] = ()) -> tuple[Row, ...]:
        """Take over the counters of an earlier process. Its live attempts that are ``kept`` count as buffered, since
        their groups were saved. The others are cancelled ("restart") and returned: their generations ended with that
        process, and their prompts are issued again as new attempts.
        """
        rows = tuple(row for row in state.live if row.attempt_id not in kept)
        self._rows = {
            row.attempt_id: msgspec.structs.replace(row, stage=Stage.BUFFERED, target_version=None)
            for row in state.live
            if row.attempt_id in kept
        }
        self._stages = Counter({Stage.BUFFERED: len(self._rows)})
        self._issued, self._last_id = state.issued, state.last_id
        self._ended, self._reasons, self._aborted = Counter(state.ended), Counter(state.reasons), state.aborted
        if rows:
            self._ended[Outcome.CANCELLED] += len(rows)
            self._reasons[f"{Outcome.CANCELLED}: restart"] += len(rows)
        return rows

    def _count_reason(self, reason: str, other: str) -> None:
        known = reason in self._reasons or len(self._reasons) < MOST_REASONS
        self._reasons[reason if known else other] += 1

    def _live(self, attempt_ids: Iterable[int]) -> list[Row]:
        attempt_ids = list(attempt_ids)
        rows = [self._rows[attempt_id] for attempt_id in attempt_ids if attempt_id in self._rows]
        if len(rows) < len(attempt_ids):
            unknown = [attempt_id for attempt_id in attempt_ids if attempt_id not in self._rows]
            raise ContractViolation(
                f"not live: ended already {[i for i in unknown if i <= self._last_id]}, "
                f"never issued {[i for i in unknown if i > self._last_id]}"
            )
        return rows

    def _move(self, rows: list[Row], before: Stage, after: Stage) -> None:
        wrong = [row for row in rows if row.stage is not before]
        if wrong or len({row.attempt_id for row in rows}) < len(rows):
            raise ContractViolation(f"expected distinct attempts that are {before}, found {wrong or rows}")
        for row in rows:
            row.stage = after
        self._stages[before] -= len(rows)
        self._stages[after] += len(rows)
