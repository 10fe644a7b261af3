"""Samples of a run: the list of a step or an evaluation, and one sample with its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from miles_async.errors import DataError
from miles_async.samples.columns import MASK_REASONS, Kind, SampleRow, SampleSummary
from miles_async.samples.files import DIRECTORY, file_of
from miles_async.samples.reader import read_note, read_sample, read_state
from miles_async.types import JsonObject
from miles_async.watch.run import Run
from miles_async.watch.sample_files import MOST_ROWS, files_of, previews
from miles_async.watch.sample_files import search as search_files

LONGEST_TEXT = 100_000  # characters of a message, unless all of it is asked for
TOKENS = 2_000  # of one request
NONE = "this run wrote no samples (--save-samples)"
_TEXTS = ("prompt", "response", "messages", "prompt_metadata", "metadata")


def samples(run: Run, kind: Kind, step: int | None) -> JsonObject:
    """{"steps": {kind: [step]}, "kind", "step", "rows", "notes"}; ``step`` None or absent: the newest one."""
    files = files_of(run.directory)
    steps = {each: [file.step for file in files if file.kind == each] for each in ("train", "eval")}
    if not files:
        return {"steps": steps, "kind": kind, "step": None, "rows": [], "notes": [NONE]}
    if not steps[kind]:
        kind = files[-1].kind
    chosen = step if step in steps[kind] else steps[kind][-1]
    file = next(each for each in files if each.kind == kind and each.step == chosen)
    rows, notes = _listed(run, file.path)
    return {"steps": steps, "kind": kind, "step": chosen, "rows": rows, "notes": notes}


def search(run: Run, kind: Kind, text: str, before: int | None = None) -> JsonObject:
    """Search all samples of a kind from step ``before`` backwards: {"rows", "next", "notes"}."""
    files = [each for each in files_of(run.directory) if each.kind == kind and (before is None or each.step <= before)]
    return search_files(files if text else [], text)


def sample(
    run: Run, kind: Kind, step: int, attempt: int, number: int, *, first: int | None = None, whole: bool = False
) -> JsonObject:
    """One sample: {"branches", "reasons", "group"}. ``first``: the first token that is shown, by default the last one
    of the prompt but a few; ``whole``: texts in full.
    """
    path = file_of(run.directory / DIRECTORY, kind, step)
    if run.file(DIRECTORY, path.name) is None:
        raise DataError(f"step {step} has no samples of {kind}: they were not written, or removed at the limit on size")
    rows = read_sample(run.directory, kind, step, attempt, number)
    if not rows:
        raise DataError(f"step {step} has no sample {number} of attempt {attempt}")
    group = [
        {"sample": row["sample"], "reward": row["reward"]}
        for row in _listed(run, path)[0]
        if row["attempt_id"] == attempt and row["branch"] == 0
    ]
    return {
        "branches": [{**_about(row, whole), "window": _window(row, first)} for row in rows],
        "reasons": MASK_REASONS,
        "group": group,
    }


def _listed(run: Run, path: Path) -> tuple[list[JsonObject], list[str]]:
    try:
        rows, note = previews(path), read_note(path)
    except (DataError, FileNotFoundError) as error:
        return [], [str(error)]
    notes = [] if note.why_fewer is None else [f"{note.groups_written} of {note.groups} groups: {note.why_fewer}"]
    if len(rows) >= MOST_ROWS:
        notes.append(f"the first {MOST_ROWS} rows of this file are shown")
    return rows, [*notes, *_state_notes(run)]


def _state_notes(run: Run) -> list[str]:
    try:
        state = read_state(run.directory)
    except DataError as error:
        return [str(error)]
    return [] if state is None else state.notes


def _about(row: SampleRow, whole: bool) -> JsonObject:
    limit = None if whole else LONGEST_TEXT
    values = {name: getattr(row, name) for name in SampleSummary.__struct_fields__ if name not in _TEXTS}
    return {
        **values,
        "turns": msgspec.to_builtins(row.turns),
        "conversation": [
            {"role": role, "text": text[:limit], "characters": len(text)} for role, text in row.conversation()
        ],
        "prompt_metadata": row.prompt_metadata[:limit],
        "metadata": row.metadata[:limit],
    }


def _window(row: SampleRow, first: int | None) -> JsonObject:
    """TOKENS tokens from ``first`` on, by column; a column is None where it is unknown."""
    start = max(0, min(first if first is not None else max(0, row.prompt_length - 50), len(row.tokens) - 1))
    part = slice(start, start + TOKENS)
    columns: dict[str, Sequence[object] | None] = {
        "texts": row.token_texts[part],
        "ids": row.tokens[part],
        "loss": row.loss_mask[part],
        "reasons": row.mask_reasons[part],
        "versions": row.weight_versions[part],
        "ages": row.ages()[part],
        "logprobs": None if row.oldest_version is None else row.rollout_logprobs[part],  # examples have no engine
        "trainer_logprobs": _cut(row.trainer_logprobs, part),
        "differences": _differences(row, part),
        "advantages": _cut(row.advantages, part),
        "entropies": _cut(row.entropies, part),
        "rewards": _cut(row.token_rewards, part),
    }
    return {"first": start, "tokens": len(row.tokens), **columns}


def _differences(row: SampleRow, part: slice) -> list[float] | None:
    """Log-prob of the engine - log-prob of the trainer, 0 where a token carries no loss."""
    if row.trainer_logprobs is None or row.oldest_version is None:
        return None
    pairs = zip(row.rollout_logprobs[part], row.trainer_logprobs[part], strict=True)
    return [engine - trainer for engine, trainer in pairs]


def _cut(values: list[float] | None, part: slice) -> list[float] | None:
    return None if values is None else values[part]
