"""Read the samples of a run, while it runs or after it. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from miles_async.errors import DataError
from miles_async.samples.columns import METADATA_KEY, SCHEMA_VERSION, FileNote, Kind, SampleRow, SampleSummary
from miles_async.samples.files import DIRECTORY, STATE_FILE, SamplesFile, SamplesState, file_of, files_in

if TYPE_CHECKING:
    import pyarrow.parquet

R = TypeVar("R", bound=SampleSummary)


def samples_files(run_dir: Path) -> list[SamplesFile]:
    """Files of a run by step, from their names alone; none if the run wrote no samples."""
    return files_in(run_dir / DIRECTORY)


def read_summaries(path: Path) -> list[SampleSummary]:
    """Rows of a file without their lists per token. Raises DataError naming the file and its fault."""
    return _read(path, SampleSummary)


def read_rows(path: Path) -> list[SampleRow]:
    """Rows of a file. Raises as :func:`read_summaries` does."""
    return _read(path, SampleRow)


def read_sample(run_dir: Path, kind: Kind, step: int, attempt_id: int, sample: int) -> list[SampleRow]:
    """The branches of one sample; none if it was not written. Raises as :func:`read_summaries` does."""
    path = file_of(run_dir / DIRECTORY, kind, step)
    return _read(path, SampleRow, {"attempt_id": attempt_id, "sample": sample}) if path.is_file() else []


def read_note(path: Path) -> FileNote:
    """Read the metadata of a file. Raises as :func:`read_summaries` does."""
    with _opened(path) as file:
        return _note(file)


def read_state(run_dir: Path) -> SamplesState | None:
    """The state of a run's samples; None if it wrote none. Raises DataError."""
    path = run_dir / DIRECTORY / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=SamplesState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path}: {error}") from error


def _read(path: Path, row_type: type[R], only: Mapping[str, int] = MappingProxyType({})) -> list[R]:
    """``only``: values of columns that the wanted rows have."""
    from pyarrow import compute

    with _opened(path) as file:
        _note(file)
        table = file.read([*row_type.__struct_fields__])
        for name, value in only.items():
            table = table.filter(compute.equal(table.column(name), value))
        rows: list[R] = msgspec.convert(table.to_pylist(), list[row_type])  # type: ignore[valid-type]
    return sorted(rows, key=lambda row: (abs(row.attempt_id), row.sample, row.branch))


@contextmanager
def _opened(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        raise DataError(f"{path}: expected a file of --save-samples: {error}") from error


def _note(file: pyarrow.parquet.ParquetFile) -> FileNote:
    encoded = (file.metadata.metadata or {}).get(METADATA_KEY)
    if encoded is None:
        raise ValueError("there is no note of a samples file in it")
    note = msgspec.json.decode(encoded, type=FileNote)
    if note.schema != SCHEMA_VERSION:
        raise ValueError(f"its schema is number {note.schema}, and this version reads number {SCHEMA_VERSION}")
    return note
