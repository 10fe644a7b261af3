"""The ledger on disk: sqlite, one row per attempt with its whole life (C2).

The in-memory ``Ledger`` of the pool is the truth; this copy is for ``miles-async ledger`` and ``explain``, during the
run (WAL: readers and the writer don't wait for each other) and after it, however it ended. Synchronous and without a
clock: ``ledger.writer`` passes the times.

It is a second check of C2. Every event but the first must find its row in the stage that precedes it, or writing
fails; so no attempt ends twice on disk either, and none ends that was never issued.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from miles_async.errors import ContractViolation
from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.ledger import ENDS_FROM, STALE, Balance, Outcome, Stage
from miles_async.staleness.versions import is_mixed
from miles_async.types import Attempt, Group, JsonObject

SCHEMA_VERSION = 3
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE attempts (
    attempt_id INTEGER PRIMARY KEY,
    prompt_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    issued_version INTEGER NOT NULL,  -- visible when it was admitted
    history TEXT NOT NULL,            -- JSON list: why each earlier attempt of this try of the prompt ended
    stage TEXT NOT NULL,              -- where it is, or where it was when it ended
    engines TEXT,                     -- JSON list, in order of first use
    chunks INTEGER,                   -- generation calls over all samples; more than samples: some were interrupted
    response_lengths TEXT,            -- JSON list, tokens per sample
    oldest_version INTEGER,           -- over the tokens that carry loss
    newest_version INTEGER,
    mixed_samples INTEGER,            -- samples whose loss tokens came from several versions
    reward_mean REAL,
    left_out INTEGER NOT NULL DEFAULT 0,  -- samples that were too old; the others went on (C7)
    target_version INTEGER,           -- of the cut that took it, or that it was too old for
    step INTEGER,                     -- rollout step that trained it, from 1
    outcome TEXT,                     -- NULL: has not ended
    reason TEXT,
    issued_at REAL NOT NULL,          -- seconds since 1970, as all times
    finished_at REAL,
    cut_at REAL,
    ended_at REAL
);
CREATE INDEX attempts_of_prompt ON attempts (prompt_id);
CREATE INDEX live_attempts ON attempts (attempt_id, stage) WHERE outcome IS NULL;
"""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """State that a resumed run took over: attempts of earlier processes, whose rows are in their run directories."""

    balance: Balance
    quarantined: tuple[DeadLetter, ...] = ()  # get no more attempts


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened at ``at``, in seconds since 1970."""

    at: float


class RestoredEvent(LedgerEvent, frozen=True, kw_only=True):
    carried: Carried


class IssuedEvent(LedgerEvent, frozen=True, kw_only=True):
    attempt: Attempt


class FinishedEvent(LedgerEvent, frozen=True, kw_only=True):
    group: Group


class TrimmedEvent(LedgerEvent, frozen=True, kw_only=True):
    group: Group  # the rest
    left_out: int


class CutEvent(LedgerEvent, frozen=True, kw_only=True):
    attempt_ids: tuple[int, ...]
    target_version: int


class EndedEvent(LedgerEvent, frozen=True, kw_only=True):
    attempt_id: int
    outcome: Outcome
    reason: str = ""
    target_version: int | None = None
    step: int | None = None


class CheckedEvent(LedgerEvent, frozen=True, kw_only=True):
    issued: int
    live: Mapping[int, Stage]


class LedgerStore:
    """Writes the ledger of one run. Call it from one thread at a time, any one."""

    def __init__(self, path: Path) -> None:
        """Creates the file. Raises sqlite3.Error (as all methods do), also if there is one already."""
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        # Safe against the end of any process; a power failure loses the last transactions, whole ones.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.executescript(SCHEMA)
        self._put("schema_version", SCHEMA_VERSION)
        self._carried_issued = 0

    def write(self, events: Sequence[LedgerEvent]) -> None:
        """Write events in order, in one transaction; none if one fails.

        Raises:
            ContractViolation: an event does not follow from the row on disk, which is named; or a check failed.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for event in events:
                WRITE[type(event)](self, event)
        except BaseException:
            with suppress(sqlite3.Error):  # on a full disk sqlite has rolled back by itself
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def compare(self, expected: Balance) -> None:
        """Compare the balance on disk with ``expected``. Raises ContractViolation naming the difference (C2)."""
        found = read_balance(self._connection)
        if found != expected:
            raise ContractViolation(f"the ledger on disk has {found}, the pool {expected}")

    def close(self) -> None:
        """Close the file; it is then one file, without WAL beside it."""
        self._connection.close()

    # -------------------------------------------------------------------------------------------- one per event
    def _restored(self, event: RestoredEvent) -> None:
        self._put("carried", msgspec.to_builtins(event.carried))
        self._carried_issued = event.carried.balance.issued

    def _issued(self, event: IssuedEvent) -> None:
        attempt = event.attempt
        self._connection.execute(
            "INSERT INTO attempts (attempt_id, prompt_id, epoch, issued_version, history, stage, issued_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                attempt.attempt_id,
                attempt.prompt.prompt_id,
                attempt.epoch,
                attempt.issued_version,
                json.dumps(attempt.history),
                Stage.IN_FLIGHT,
                event.at,
            ),
        )

    def _finished(self, event: FinishedEvent) -> None:
        self._move(
            [event.group.attempt.attempt_id],
            [Stage.IN_FLIGHT],
            stage=Stage.BUFFERED,
            finished_at=event.at,
            left_out=event.group.aborted,
            **_described(event.group),
        )

    def _trimmed(self, event: TrimmedEvent) -> None:
        attempt_id = event.group.attempt.attempt_id
        self._move([attempt_id], [Stage.BUFFERED], **_described(event.group))
        self._connection.execute(
            "UPDATE attempts SET left_out = left_out + ? WHERE attempt_id = ?", (event.left_out, attempt_id)
        )

    def _cut(self, event: CutEvent) -> None:
        self._move(
            event.attempt_ids,
            [Stage.BUFFERED],
            stage=Stage.CUT,
            target_version=event.target_version,
            cut_at=event.at,
        )

    def _ended(self, event: EndedEvent) -> None:
        stages = {*ENDS_FROM[event.outcome]}
        if event.outcome is Outcome.FILTERED:
            stages.add(Stage.BUFFERED)  # what a filter judges is finished, though it never enters the buffer
        known = {"target_version": event.target_version, "step": event.step}
        self._move(
            [event.attempt_id],
            stages,
            outcome=event.outcome,
            reason=event.reason or None,
            ended_at=event.at,
            **{column: value for column, value in known.items() if value is not None},
        )

    def _checked(self, event: CheckedEvent) -> None:
        rows = self._connection.execute("SELECT attempt_id, stage FROM attempts WHERE outcome IS NULL")
        found = {attempt_id: Stage(stage) for attempt_id, stage in rows}
        if wrong := found.keys() ^ event.live.keys() | {i for i in found if found[i] is not event.live.get(i)}:
            raise ContractViolation(
                "the ledger on disk and the pool disagree about (attempt: on disk, in the pool) "
                + ", ".join(f"{i}: {found.get(i)}, {event.live.get(i)}" for i in sorted(wrong))
            )
        (rows_on_disk,) = self._connection.execute("SELECT count(*) FROM attempts").fetchone()
        if self._carried_issued + rows_on_disk != event.issued:
            raise ContractViolation(
                f"{event.issued} attempts were issued, and the ledger on disk knows {rows_on_disk} "
                f"and {self._carried_issued} of earlier processes"
            )

    # -------------------------------------------------------------------------------------------------- helpers
    def _move(self, attempt_ids: Sequence[int], stages: Iterable[Stage], **values: object) -> None:
        """Set columns of live rows that are in one of ``stages``."""
        stages = sorted(stages)
        columns = ", ".join(f"{column} = ?" for column in values)
        statement = (
            f"UPDATE attempts SET {columns} WHERE attempt_id = ? AND outcome IS NULL "
            f"AND stage IN ({', '.join('?' * len(stages))})"
        )
        for attempt_id in attempt_ids:
            moved = self._connection.execute(statement, (*values.values(), attempt_id, *stages))
            if moved.rowcount != 1:
                row = self._connection.execute("SELECT * FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone()
                raise ContractViolation(
                    f"expected attempt {attempt_id} in the ledger, live and {' or '.join(stages)}, to set "
                    f"{values}; found {row}"
                )

    def _put(self, key: str, value: object) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


WRITE: Mapping[type[LedgerEvent], Callable[[LedgerStore, Any], None]] = {
    RestoredEvent: LedgerStore._restored,
    IssuedEvent: LedgerStore._issued,
    FinishedEvent: LedgerStore._finished,
    TrimmedEvent: LedgerStore._trimmed,
    CutEvent: LedgerStore._cut,
    EndedEvent: LedgerStore._ended,
    CheckedEvent: LedgerStore._checked,
}


def read_carried(connection: sqlite3.Connection) -> Carried | None:
    """Read the state that a resumed run took over; None for a run that started fresh."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'carried'").fetchone()
    return msgspec.json.decode(row[0], type=Carried) if row else None


def read_balance(connection: sqlite3.Connection) -> Balance:
    """Read the balance as the pool has it, with attempts of earlier processes."""
    carried = read_carried(connection)
    ended = {str(outcome): carried.balance.ended[outcome] if carried else 0 for outcome in Outcome}
    reasons = dict(carried.balance.reasons) if carried else {}
    aborted = carried.balance.aborted if carried else 0
    stages = dict.fromkeys(Stage, 0)
    issued = carried.balance.issued if carried else 0
    counts = "SELECT outcome, reason, stage, count(*) FROM attempts GROUP BY outcome, reason, stage"
    for outcome, reason, stage, count in connection.execute(counts):
        issued += count
        if outcome is None:
            stages[Stage(stage)] += count
            continue
        ended[outcome] += count
        if outcome in STALE and stage == Stage.IN_FLIGHT:
            aborted += count
        if reason:
            reasons[f"{outcome}: {reason}"] = reasons.get(f"{outcome}: {reason}", 0) + count
    return Balance(
        issued=issued,
        in_flight=stages[Stage.IN_FLIGHT],
        buffered=stages[Stage.BUFFERED],
        cut=stages[Stage.CUT],
        ended=ended,
        reasons=reasons,
        aborted=aborted,
    )


def _described(group: Group) -> JsonObject:
    """Columns about what was generated."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    return {
        "engines": json.dumps(_engines(group)),
        "chunks": sum(_chunks(sample.metadata) for sample in group.samples),
        "response_lengths": json.dumps([sample.response_length for sample in group.samples]),
        "oldest_version": group.oldest_version,
        "newest_version": group.newest_version,
        # Most groups are of one version, and then no sample needs to be looked at.
        "mixed_samples": sum(is_mixed(sample) for sample in group.samples)
        if group.oldest_version != group.newest_version
        else 0,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
    }


def _engines(group: Group) -> list[str]:
    """Engines noted by ``rollout.generate``; a Generate of the user's may note nothing, or anything."""
    found: dict[str, None] = {}
    for sample in group.samples:
        engines = sample.metadata.get("engines", ())
        if isinstance(engines, list | tuple):
            found |= dict.fromkeys(str(engine) for engine in engines)
    return list(found)


def _chunks(metadata: JsonObject) -> int:
    chunks = metadata.get("chunks", 1)
    return chunks if isinstance(chunks, int) else 1
