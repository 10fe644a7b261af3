"""Rows for tests of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles_async.samples.columns import FileNote, Kind, SampleRow, Turn
from miles_async.samples.files import DIRECTORY, file_of
from miles_async.samples.parquet_writer import FileWriter


def row(**fields: Any) -> SampleRow:
    """A sample of 5 tokens, 2 of them the prompt's and the last one without loss, changed by ``fields``."""
    base = SampleRow(
        kind="train",
        step=10,
        data_set=None,
        prompt_id="train.jsonl:7",
        attempt_id=17,
        epoch=0,
        sample=0,
        branch=0,
        samples=2,
        branches=1,
        reward=0.5,
        reward_parts=None,
        finish_reason="stop",
        truncated=False,
        filtered=None,
        prompt_length=2,
        length=3,
        loss_tokens=2,
        issued_version=7,
        target_version=9,
        oldest_version=7,
        newest_version=8,
        age=2,
        advantage=0.25,
        logprob_difference=None,
        written_at=1.8e9,
        prompt="rev 12",
        response="21",
        label="21",
        messages=None,
        prompt_metadata="{}",
        metadata="{}",
        turns=[Turn(start=2, end=5, seconds=0.5)],
        tokens=[5, 6, 7, 8, 2],
        token_texts=["rev", " 12", "2", "1", "</s>"],
        loss_mask=[0, 0, 1, 1, 0],
        mask_reasons=[1, 1, 0, 0, 5],
        weight_versions=[-1, -1, 7, 8, 8],
        rollout_logprobs=[0.0, 0.0, -0.5, -0.25, 0.0],
        advantages=[0.0, 0.0, 0.25, 0.25, 0.0],
    )
    return msgspec.structs.replace(base, **fields)


def write_file(path: Path, note: FileNote, rows: Sequence[SampleRow]) -> None:
    """Write a whole file."""
    writer = FileWriter(path)
    writer.add(rows)
    writer.close(note)


def write_samples(run_dir: Path, kind: Kind, step: int, rows: Sequence[SampleRow] | None = None) -> Path:
    """Write the file of a step or evaluation as a run does; by default it has one sample."""
    path = file_of(run_dir / DIRECTORY, kind, step)
    write_file(path, FileNote(kind=kind, step=step, groups=1, groups_written=1), rows or [row(kind=kind, step=step)])
    return path
