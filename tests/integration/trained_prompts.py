"""Prompts that a run of the quick start trained, from its ledger and checkpoints, and those of its prompt source."""

from __future__ import annotations

import json
from pathlib import Path

from miles_async.arguments.data import DataArguments
from miles_async.ledger.reader import AttemptRecord, open_ledger
from miles_async.prompts.source import FilePromptSource
from miles_async.rollout.checkpoint import RolloutSnapshot
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.staleness.ledger import Outcome
from tests.integration.real_run import QUICKSTART


def source_order(count: int) -> list[str]:
    """Ids of the first prompts of the quick start, in the order of its source."""
    prompts = QUICKSTART / "assets" / "reverse" / "train.jsonl"
    source = FilePromptSource(DataArguments(prompt_data=(str(prompts),)), lambda *_: (1,))
    return [prompt.prompt_id for _, prompt in source.take(count)]


def attempts(run_dir: Path) -> list[AttemptRecord]:
    """All rows of the run's ledger, in order of admission."""
    with open_ledger(run_dir / LEDGER_FILE) as ledger:
        first, last = ledger.attempt_range() or (0, -1)
        rows = [row for number in range(first, last + 1) for row in ledger.find(str(number))]
        return sorted({row.attempt_id: row for row in rows}.values(), key=lambda row: row.attempt_id)


def trained(run_dir: Path) -> list[AttemptRecord]:
    """The attempts that the optimizer stepped with."""
    return [row for row in attempts(run_dir) if row.outcome is Outcome.TRAINED]


def position(checkpoint: Path) -> int:
    """Steps that were trained when the checkpoint was written."""
    return int(json.loads((checkpoint / "position.json").read_text())["step"])


def settled(snapshot: RolloutSnapshot) -> list[str]:
    """Prompts that the cursor has passed, that nobody is owed an attempt for and no group waits of: trained, if nothing
    was dropped.
    """
    state = snapshot.pool.state
    missing = {retry.prompt.prompt_id for retry in (*state.owed, *state.book.retries)}
    missing |= {group.attempt.prompt.prompt_id for group in snapshot.pool.groups}
    assert snapshot.source["epoch"] == 0
    return [prompt for prompt in source_order(snapshot.source["position"]) if prompt not in missing]
