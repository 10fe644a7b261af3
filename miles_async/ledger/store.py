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
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from miles_async.errors import ContractViolation
from miles_async.runtime.texts import shortened
from miles_async.staleness.events import (
    Changed,
    Checked,
    Cut,
    Ended,
    EpochBegan,
    Finished,
    Issued,
    PoolEvent,
    PromptsOpened,
    Restored,
    Trimmed,
)
from miles_async.staleness.ledger import ENDS_FROM, STALE, Balance, Outcome, Stage
from miles_async.staleness.versions import is_mixed
from miles_async.types import Group, JsonObject

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
    rewards TEXT,                     -- JSON list, per sample
    left_out INTEGER NOT NULL DEFAULT 0,  -- samples that were too old; the others stayed (C7)
    target_version INTEGER,           -- of the cut that took it, or that it was too old for
    step INTEGER,                     -- rollout step that trained it, from 1
    outcome TEXT,                     -- NULL: has not ended
    reason TEXT,
    issued_at REAL NOT NULL,          -- seconds since 1970, as all times
    finished_at REAL,
    cut_at REAL,
    ended_at REAL
);
CREATE TABLE changes (                -- by `miles-async set`
    step INTEGER NOT NULL,            -- rollout step after which it took effect
    name TEXT NOT NULL,               -- of the flag, without dashes, or of a request such as evaluation
    before TEXT NOT NULL,             -- JSON
    value TEXT NOT NULL,              -- JSON
    at REAL NOT NULL
);
CREATE TABLE epochs (
    data TEXT NOT NULL,               -- file of prompts, or all
    epoch INTEGER NOT NULL,
    sampler TEXT NOT NULL,            -- --prompt-sampler
    prompts INTEGER NOT NULL,         -- rows that the epoch gives
    left_out INTEGER NOT NULL,        -- rows that it does not
    began_at REAL NOT NULL
);
CREATE INDEX attempts_of_prompt ON attempts (prompt_id);
CREATE INDEX live_attempts ON attempts (attempt_id, stage) WHERE outcome IS NULL;
"""


TimedEvent = tuple[float, PoolEvent]
"""When it happened, in seconds since 1970, and the event."""


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

    def write(self, events: Sequence[TimedEvent]) -> None:
        """Write events in order, in one transaction; none if one fails.

        Raises:
            ContractViolation: an event does not follow from the row on disk, which is named; or a check failed.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for at, event in events:
                self._apply(at, event)
        except BaseException:
            with suppress(sqlite3.Error):  # on a full disk sqlite has rolled back by itself
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def compare(self, expected: Balance) -> None:
        """Compare the balance on disk with ``expected``. Raises ContractViolation naming the difference (C2)."""
        found = read_balance(self._connection)
        if _without_texts(found) != _without_texts(expected):
            raise ContractViolation(f"the ledger on disk has {found}, the pool {expected}")

    def close(self) -> None:
        """Close the file; the WAL is merged into it."""
        self._connection.close()

    # --------------------------------------------------------------------------------------------------- events
    def _apply(self, at: float, event: PoolEvent) -> None:
        match event:
            case Restored():
                self._put("carried", msgspec.to_builtins(event))
                self._carried_issued = event.balance.issued
            case Issued(attempt):
                self._insert(
                    "attempts",
                    attempt_id=attempt.attempt_id,
                    prompt_id=attempt.prompt.prompt_id,
                    epoch=attempt.epoch,
                    issued_version=attempt.issued_version,
                    history=json.dumps(attempt.history),
                    stage=Stage.IN_FLIGHT,
                    issued_at=at,
                )
            case Finished(group):
                columns = {"stage": Stage.BUFFERED, "finished_at": at, "left_out": group.aborted}
                self._move([group.attempt.attempt_id], [Stage.IN_FLIGHT], **columns, **_described(group))
            case Trimmed(group, left_out):
                attempt_id = group.attempt.attempt_id
                self._move([attempt_id], [Stage.BUFFERED], **_described(group))
                self._connection.execute(
                    "UPDATE attempts SET left_out = left_out + ? WHERE attempt_id = ?", (left_out, attempt_id)
                )
            case Cut(attempt_ids, target_version):
                columns = {"stage": Stage.CUT, "target_version": target_version, "cut_at": at}
                self._move(attempt_ids, [Stage.BUFFERED], **columns)
            case Ended():
                self._end(at, event)
            case Checked():
                self._check(event)
            case Changed(changes):
                for name, value in changes.values.items():
                    flag, before = name.replace("_", "-"), json.dumps(changes.before.get(name))
                    self._insert(
                        "changes", step=changes.after, name=flag, before=before, value=json.dumps(value), at=at
                    )
            case EpochBegan():
                self._insert("epochs", **msgspec.structs.asdict(event), began_at=at)
            case PromptsOpened():
                self._put("prompts", msgspec.to_builtins(event))

    def _end(self, at: float, event: Ended) -> None:
        stages = {*ENDS_FROM[event.outcome]}
        if event.outcome is Outcome.FILTERED:
            stages.add(Stage.BUFFERED)  # groups seen by a filter are finished, though they never enter the buffer
        known = {"target_version": event.target_version, "step": event.step}
        self._move(
            [event.attempt_id],
            stages,
            outcome=event.outcome,
            reason=shortened(event.reason) or None,
            ended_at=at,
            **{column: value for column, value in known.items() if value is not None},
        )

    def _check(self, event: Checked) -> None:
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
    def _insert(self, table: str, **values: object) -> None:
        columns, places = ", ".join(values), ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", (*values.values(),))

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


def read_carried(connection: sqlite3.Connection) -> Restored | None:
    """Read the state that a resumed run took over; None for a run that started fresh."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'carried'").fetchone()
    return msgspec.json.decode(row[0], type=Restored) if row else None


Counts = Counter[tuple[str | None, str | None, str]]
"""(outcome, reason, stage) → attempts."""


def count_attempts(connection: sqlite3.Connection, low: int = 0, high: int = sys.maxsize) -> Counts:
    """Count the attempts with ids in [low, high)."""
    rows = connection.execute(
        "SELECT outcome, reason, stage, count(*) FROM attempts WHERE attempt_id >= ? AND attempt_id < ? "
        "GROUP BY outcome, reason, stage",
        (low, high),
    )
    return Counter({(outcome, reason, stage): count for outcome, reason, stage, count in rows})


def read_balance(connection: sqlite3.Connection, counts: Counts | None = None) -> Balance:
    """Read the balance as the pool has it, with attempts of earlier processes. ``counts``: by default of all rows."""
    carried = read_carried(connection)
    issued, aborted = (carried.balance.issued, carried.balance.aborted) if carried else (0, 0)
    ended = Counter({Outcome(name): count for name, count in carried.balance.ended.items()} if carried else {})
    reasons = Counter(carried.balance.reasons if carried else {})
    stages: Counter[Stage] = Counter()
    counts = count_attempts(connection) if counts is None else counts
    for (outcome, reason, stage), count in counts.items():
        issued += count
        if outcome is None:
            stages[Stage(stage)] += count
            continue
        ended[Outcome(outcome)] += count
        if outcome in STALE and stage == Stage.IN_FLIGHT:
            aborted += count
        if reason:
            reasons[f"{outcome}: {reason}"] += count
    return Balance.of(issued, stages, ended, reasons, aborted)


def _without_texts(balance: Balance) -> Balance:
    """The balance with its reasons added up by outcome: the pool bounds how many it counts one by one."""
    reasons: Counter[str] = Counter()
    for reason, count in balance.reasons.items():
        reasons[reason.partition(": ")[0]] += count
    return msgspec.structs.replace(balance, reasons=reasons)


def _described(group: Group) -> JsonObject:
    """Columns about the generated samples."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    return {
        "engines": json.dumps(_engines(group)),
        "chunks": sum(_chunks(sample.metadata) for sample in group.samples),
        "response_lengths": json.dumps([sample.longest_response for sample in group.samples]),
        "oldest_version": group.oldest_version,
        "newest_version": group.newest_version,
        # Most groups have one version, and then no sample needs to be looked at.
        "mixed_samples": sum(is_mixed(sample) for sample in group.samples)
        if group.oldest_version != group.newest_version
        else 0,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "rewards": json.dumps(rewards),
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
