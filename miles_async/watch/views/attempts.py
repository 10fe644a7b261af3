"""Attempts of a run, and the story of each, as `miles-async explain` tells it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from miles_async.errors import LedgerError
from miles_async.ledger.reader import AttemptRecord, LedgerReader
from miles_async.ledger.story import tell
from miles_async.staleness.ledger import Outcome, Stage
from miles_async.types import JsonObject
from miles_async.watch.run import Run

PAGE = 100
ENDS = (*map(str, Stage), *map(str, Outcome))
MOST_STORIES = 50  # of one prompt
MOST_DEAD_LETTERS = 200
NO_LEDGER = "this run directory has no ledger.sqlite"


def attempts(run: Run, *, text: str = "", end: str = "", before: int | None = None) -> JsonObject:
    """{"rows": newest first, "more": whether older ones match, "quarantined": prompts with their reasons}."""
    try:
        balance = run.balance()
        with run.ledger() as reader:
            if reader is None or balance is None:
                return {"rows": [], "more": False, "quarantined": [], "missing": NO_LEDGER}
            found = reader.page(text=text, end=end, before=before, limit=PAGE + 1)
            some = balance.ended.get(Outcome.QUARANTINED, 0) > 0  # to look for none takes long in a large ledger
            letters = reader.dead_letters()[:MOST_DEAD_LETTERS] if some else ()
    except LedgerError as error:
        return {"rows": [], "more": False, "quarantined": [], "missing": str(error)}
    return {
        "rows": [_row(record) for record in found[:PAGE]],
        "more": len(found) > PAGE,
        "quarantined": [msgspec.to_builtins(letter) for letter in letters],
    }


def story(run: Run, subject: str) -> JsonObject:
    """{"stories": [{"attempt", "prompt", "outcome", "lines", "step"}]} of an attempt's number or a prompt's id."""
    try:
        with run.ledger() as reader:
            if reader is None:
                return {"stories": [], "missing": NO_LEDGER}
            records = reader.find(subject)[:MOST_STORIES]
            stories = [_story(reader, record) for record in records]
    except LedgerError as error:
        return {"stories": [], "missing": str(error)}
    return {"stories": stories} | (
        {} if stories else {"missing": f"no prompt and no attempt {subject!r} in the ledger"}
    )


def _story(reader: LedgerReader, record: AttemptRecord) -> JsonObject:
    text = tell(record, started_at=reader.started_at(), came_again_as=reader.next_attempt(record))
    return {**_row(record), "lines": [line.removeprefix("  ") for line in text.split("\n")]}


def _row(record: AttemptRecord) -> Mapping[str, object]:
    lengths = record.response_lengths or ()
    return {
        "attempt": record.attempt_id,
        "prompt": record.prompt_id,
        "epoch": record.epoch,
        "end": str(record.outcome or record.stage),
        "reason": record.reason,
        "step": record.step,
        "reward": record.reward_mean,
        "samples": len(lengths),
        "longest": max(lengths, default=None),
        "versions": [record.oldest_version, record.newest_version],
        "seconds": None if record.finished_at is None else record.finished_at - record.issued_at,
        "engines": list(record.engines or ()),
    }
