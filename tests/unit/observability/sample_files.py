"""Files as --save-samples writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_async.samples.columns import FileNote, Kind, SampleRow
from miles_async.samples.files import DIRECTORY, file_of
from tests.unit.samples.sample_rows import row, write_file


def write_samples(run_dir: Path, kind: Kind, step: int, rows: Sequence[SampleRow] | None = None) -> Path:
    """Write the file of a step or evaluation; by default it has one sample."""
    path = file_of(run_dir / DIRECTORY, kind, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, FileNote(kind=kind, step=step, groups=1, groups_written=1), rows or [row(kind=kind, step=step)])
    return path
