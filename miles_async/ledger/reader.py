"""Read the ledger of a live, finished or killed run."""

from __future__ import annotations

import difflib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from miles_async.errors import LedgerError
from miles_async.ledger.connection import connected
from miles_async.ledger.store import SCHEMA_VERSION, Counts, count_attempts, read_balance, read_carried
from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.events import EpochBegan, PromptsOpened, Restored
from miles_async.staleness.ledger import Balance, Outcome, Stage
from miles_async.types import SettingValue

MAX_CANDIDATES = 10_000  # prompts searched for an id similar to the one asked for


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ledger. The columns are explained where they are made: ``store.SCHEMA``."""

    attempt_id: int
    prompt_id: str
    epoch: int
    issued_version: int
    history: tuple[str, ...]
    stage: Stage
    engines: tuple[str, ...] | None
    chunks: int | None
    response_lengths: tuple[int, ...] | None
    oldest_version: int | None
    newest_version: int | None
    mixed_samples: int | None
    reward_mean: float | None
    left_out: int
    target_version: int | None
    step: int | None
    outcome: Outcome | None
    reason: str | None
    issued_at: float
    finished_at: float | None
    cut_at: float | None
    ended_at: float | None


class CutRecord(msgspec.Struct, frozen=True):
    """One batch that left the buffer."""

    at: float  # seconds since 1970
    target_version: int
    groups: int
    oldest_version: int | None


class ChangeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that was changed, or one request, while the run was live."""

    at: float  # seconds since 1970
    step: int  # rollout step after which it took effect
    name: str
    before: SettingValue
    value: SettingValue

    def __str__(self) -> str:
        return f"after step {self.step}: {self.change}"

    @property
    def change(self) -> str:
        """The change without its step, such as ``lr 0.0005 → 0.0004``."""
        asked_once = isinstance(self.value, str) and self.before is None  # a request, which replaced no value
        before = "" if asked_once else f"{_shown(self.before)} → "
        return f"{self.name} {before}{_shown(self.value)}"


def _shown(value: SettingValue) -> str:
    return "none" if value is None else str(value)


class Lengths(msgspec.Struct, frozen=True):
    """Response lengths in tokens."""

    where: str  # an Outcome, or a Stage of attempts that have not ended
    samples: int
    mean: float
    longest: int


@dataclass
class Settled:
    """Attempts that have ended and were counted: all those with ids below ``below``."""

    below: int = 0
    counts: Counts = field(default_factory=Counter)


class LedgerReader:
    """Queries on the ledger of one run."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def balance(self) -> Balance:
        """Balance as of the last flush; in a resumed run, with the attempts of earlier processes."""
        return read_balance(self._connection)

    def balance_after(self, settled: Settled) -> Balance:
        """As :meth:`balance`, counting only attempts from ``settled.below`` on, and moving it up to the first live one.

        An attempt that has ended does not change any more, so a reader that asks again and again counts few rows.
        """
        live, last = self._connection.execute(
            "SELECT (SELECT min(attempt_id) FROM attempts WHERE outcome IS NULL), "
            "(SELECT max(attempt_id) FROM attempts)"
        ).fetchone()
        first_live = live if live is not None else 0 if last is None else last + 1
        if first_live > settled.below:
            settled.counts.update(count_attempts(self._connection, settled.below, first_live))
            settled.below = first_live
        return read_balance(self._connection, settled.counts + count_attempts(self._connection, settled.below))

    def carried(self) -> Restored | None:
        """State that a resumed run took over; None for one that started fresh."""
        return read_carried(self._connection)

    def epochs(self) -> tuple[EpochBegan, ...]:
        """Epochs of prompts, in order."""
        rows = self._connection.execute(
            "SELECT data, epoch, sampler, prompts, left_out FROM epochs ORDER BY began_at, rowid"
        )
        return tuple(EpochBegan(*row) for row in rows)

    def prompts_opened(self) -> PromptsOpened | None:
        """The prompt data of the run; None before it was opened."""
        row = self._connection.execute("SELECT value FROM meta WHERE key = 'prompts'").fetchone()
        return msgspec.json.decode(row[0], type=PromptsOpened) if row else None

    def group_rewards(self) -> Iterator[tuple[str, list[float]]]:
        """(prompt id, rewards of its samples) of each finished group, in the order in which they were finished."""
        rows = self._connection.execute(
            "SELECT prompt_id, rewards FROM attempts WHERE finished_at IS NOT NULL ORDER BY finished_at, attempt_id"
        )
        yield from ((str(prompt_id), msgspec.json.decode(rewards, type=list[float])) for prompt_id, rewards in rows)

    def response_lengths(self) -> tuple[Lengths, ...]:
        """Response lengths of all generated samples, by the outcome or stage of their attempt (C5)."""
        rows = self._connection.execute(
            "SELECT coalesce(outcome, stage), count(*), avg(value), max(value) "
            "FROM attempts, json_each(attempts.response_lengths) GROUP BY 1 ORDER BY 2 DESC, 1"
        )
        return tuple(Lengths(*row) for row in rows)

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Quarantined prompts: first from earlier processes, then from this run."""
        carried = self.carried()
        rows = self._records("WHERE outcome = ? ORDER BY attempt_id", Outcome.QUARANTINED)
        own = (
            DeadLetter(prompt_id=row.prompt_id, epoch=row.epoch, reasons=(*row.history, row.reason or ""))
            for row in rows
        )
        return (*(carried.quarantined if carried else ()), *own)

    def find(self, prompt_or_attempt: str) -> tuple[AttemptRecord, ...]:
        """Find the attempts of a prompt id, or an attempt by its number, in order of admission."""
        number = int(prompt_or_attempt) if prompt_or_attempt.isdecimal() and len(prompt_or_attempt) < 19 else -1
        condition = "WHERE prompt_id = ? OR attempt_id = ? ORDER BY attempt_id"
        return tuple(self._records(condition, prompt_or_attempt, number))

    def page(
        self, *, text: str = "", end: str = "", before: int | None = None, limit: int = 100
    ) -> list[AttemptRecord]:
        """The newest attempts below the number ``before``, newest first.

        ``text``: in the prompt's id or the reason; ``end``: an Outcome, or a Stage of attempts that have not ended.
        """
        condition = (
            "WHERE attempt_id < ? AND (? = '' OR coalesce(outcome, stage) = ?) "
            "AND (? = '' OR instr(prompt_id, ?) OR instr(coalesce(reason, ''), ?)) ORDER BY attempt_id DESC LIMIT ?"
        )
        newest = 1 << 62 if before is None else before
        return [*self._records(condition, newest, end, end, text, text, text, limit)]

    def spans(self, limit: int) -> list[tuple[float, float | None]]:
        """(issued, finished or ended) of the newest attempts, newest first; None while one is in flight."""
        rows = self._connection.execute(
            "SELECT issued_at, coalesce(finished_at, ended_at) FROM attempts ORDER BY attempt_id DESC LIMIT ?", (limit,)
        )
        return [(float(start), end if end is None else float(end)) for start, end in rows]

    def alive_since(self, at: float) -> Iterator[AttemptRecord]:
        """Attempts that had not ended before ``at``, in order of admission."""
        return self._records("WHERE coalesce(ended_at, ?) >= ? ORDER BY attempt_id", at, at)

    def newest_issued_at(self, count: int) -> float:
        """When the first of the newest ``count`` attempts was issued; 0 if there are no more than that."""
        row = self._connection.execute(
            "SELECT issued_at FROM attempts ORDER BY attempt_id DESC LIMIT 2 OFFSET ?", (count - 1,)
        ).fetchall()
        return float(row[0][0]) if len(row) == 2 else 0.0

    def last_at(self) -> float:
        """Time of the newest event; 0 if there is none."""
        (last,) = self._connection.execute(
            "SELECT max(max(issued_at, coalesce(finished_at, 0), coalesce(cut_at, 0), coalesce(ended_at, 0))) "
            "FROM attempts"
        ).fetchone()
        return 0.0 if last is None else float(last)

    def cuts(self) -> Iterator[CutRecord]:
        rows = self._connection.execute(
            "SELECT cut_at, target_version, count(*), min(oldest_version) FROM attempts WHERE cut_at IS NOT NULL "
            "GROUP BY cut_at, target_version ORDER BY cut_at"
        )
        yield from (CutRecord(*row) for row in rows)

    def changes(self) -> tuple[ChangeRecord, ...]:
        """Changes made by ``miles-async set``, in order."""
        rows = self._connection.execute("SELECT at, step, name, before, value FROM changes ORDER BY rowid")
        return tuple(
            ChangeRecord(at=at, step=step, name=name, before=json.loads(before), value=json.loads(value))
            for at, step, name, before, value in rows
        )

    def trained_at(self) -> dict[int, float]:
        """Step → when its batch had been trained."""
        rows = self._connection.execute("SELECT step, min(ended_at) FROM attempts WHERE step IS NOT NULL GROUP BY step")
        return {int(step): float(at) for step, at in rows}

    def first_issued_at(self) -> dict[int, float]:
        """Weight version → when the first attempt was issued under it."""
        rows = self._connection.execute("SELECT issued_version, min(issued_at) FROM attempts GROUP BY issued_version")
        return {int(version): float(at) for version, at in rows}

    def next_attempt(self, record: AttemptRecord) -> int | None:
        """The attempt that its prompt got after this one, within the same epoch."""
        (found,) = self._connection.execute(
            "SELECT min(attempt_id) FROM attempts WHERE prompt_id = ? AND epoch = ? AND attempt_id > ?",
            (record.prompt_id, record.epoch, record.attempt_id),
        ).fetchone()
        return found if found is None else int(found)

    def started_at(self) -> float:
        """Time of the first attempt in seconds since 1970; 0 if there is none."""
        row = self._connection.execute("SELECT issued_at FROM attempts ORDER BY attempt_id LIMIT 1").fetchone()
        return float(row[0]) if row else 0.0

    def generations(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(seconds from admission until its last sample was finished, response lengths) of each finished group."""
        rows = self._connection.execute(
            "SELECT finished_at - issued_at, response_lengths FROM attempts "
            "WHERE finished_at IS NOT NULL AND response_lengths IS NOT NULL ORDER BY attempt_id"
        )
        yield from ((float(seconds), tuple(msgspec.json.decode(lengths))) for seconds, lengths in rows)

    def attempt_range(self) -> tuple[int, int] | None:
        """Ids of the first and last attempt; None if there is none."""
        first, last = self._connection.execute("SELECT min(attempt_id), max(attempt_id) FROM attempts").fetchone()
        return None if first is None else (int(first), int(last))

    def prompts_issued(self) -> int:
        """Distinct prompts with an attempt in this ledger."""
        (count,) = self._connection.execute("SELECT count(DISTINCT prompt_id) FROM attempts").fetchone()
        return int(count)

    def nearest_prompt(self, prompt_id: str) -> str | None:
        """Id of the prompt most similar to ``prompt_id``: one that contains it, else one with a similar spelling."""
        row = self._connection.execute(
            "SELECT prompt_id FROM attempts WHERE instr(prompt_id, ?) LIMIT 1", (prompt_id,)
        ).fetchone()
        if row:
            return str(row[0])
        rows = self._connection.execute("SELECT DISTINCT prompt_id FROM attempts LIMIT ?", (MAX_CANDIDATES,))
        nearest = difflib.get_close_matches(prompt_id, [str(name) for (name,) in rows], n=1)
        return nearest[0] if nearest else None

    def _records(self, condition: str, *values: object) -> Iterator[AttemptRecord]:
        names = AttemptRecord.__struct_fields__
        for row in self._connection.execute(f"SELECT {', '.join(names)} FROM attempts {condition}", values):
            yield _record(dict(zip(names, row, strict=True)))


class _MalformedRowError(Exception):
    """A row that no version of this project wrote."""


def _record(columns: dict[str, object]) -> AttemptRecord:
    try:
        for name in ("history", "engines", "response_lengths"):
            if isinstance(text := columns[name], str):
                columns[name] = msgspec.json.decode(text)
        return msgspec.convert(columns, AttemptRecord)
    except msgspec.MsgspecError as error:
        raise _MalformedRowError(f"attempt {columns['attempt_id']}: {error}") from error


@contextmanager
def open_ledger(path: Path) -> Iterator[LedgerReader]:
    """Open a ledger for reading.

    Raises:
        LedgerError: the file cannot be read, or another version of this project wrote it; also inside the block.
    """
    try:
        with connected(path) as connection:
            row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
            version = int(row[0]) if row else None
            if version != SCHEMA_VERSION:
                raise LedgerError(f"{path}: expected a ledger of format {SCHEMA_VERSION}, found {version}")
            yield LedgerReader(connection)
    except (sqlite3.Error, OSError, _MalformedRowError) as error:
        raise LedgerError(f"{path}: cannot read this ledger: {error}") from error
