"""Lists of samples from their files, with short texts: a file may hold answers of a megabyte each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from pathlib import Path

from miles_async.errors import DataError
from miles_async.samples.columns import SampleSummary
from miles_async.samples.files import DIRECTORY, SamplesFile
from miles_async.samples.query import in_messages
from miles_async.samples.reader import samples_files
from miles_async.types import JsonObject

PREVIEW = 200  # characters of prompt, response and label
MOST_ROWS = 5_000  # of one file
SEARCH_SECONDS = 1.0  # after which a search says where it stopped
MOST_FOUND = 200
MOST_NOTES = 20
_TEXTS = ("prompt", "response", "label")
_CONVERSATION = "messages"  # JSON
_LEFT_OUT = (_CONVERSATION, "prompt_metadata", "metadata", "kind", "written_at")  # of a list
_COLUMNS = [*(name for name in SampleSummary.__struct_fields__ if name not in _LEFT_OUT), "turns"]
_BATCH = 128  # rows in memory at once


def files_of(run_dir: Path) -> tuple[SamplesFile, ...]:
    """As ``samples_files``, kept until the directory changes: a long run has 10,000 files."""
    try:
        return _files(run_dir, (run_dir / DIRECTORY).stat().st_mtime_ns)
    except FileNotFoundError:
        return ()


@lru_cache(maxsize=16)
def _files(run_dir: Path, _changed: int) -> tuple[SamplesFile, ...]:
    return tuple(samples_files(run_dir))


def previews(path: Path) -> list[JsonObject]:
    """Rows of a file without lists and with short texts, ``turns`` as their number. Raises DataError."""
    return _previews(path, path.stat().st_mtime_ns) if path.is_file() else []


def search(files: Sequence[SamplesFile], text: str, *, clock: Callable[[], float] = time.monotonic) -> JsonObject:
    """Search prompts, responses, labels and conversations, in any case, the newest step first.

    {"rows": as :func:`previews` has them, "next": step from which to search on, backwards; None: all was searched,
    "notes": files that were skipped, the first ones}.
    """
    end = clock() + SEARCH_SECONDS
    rows: list[JsonObject] = []
    notes: list[str] = []
    for file in sorted(files, reverse=True):
        if len(rows) >= MOST_FOUND or clock() > end:
            return {"rows": rows, "next": file.step, "notes": notes[:MOST_NOTES]}
        try:
            rows += _read(file.path, text)
        except DataError as error:
            notes.append(str(error))
    return {"rows": rows, "next": None, "notes": notes[:MOST_NOTES]}


@lru_cache(maxsize=4)  # a view sorts and filters one file again and again
def _previews(path: Path, _changed: int) -> list[JsonObject]:
    return _read(path)


def _read(path: Path, text: str = "") -> list[JsonObject]:
    import pyarrow as arrow

    try:
        return [*_rows(path, text)]
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        raise DataError(f"{path}: cannot read these samples: {error}") from error


def _rows(path: Path, text: str) -> Iterator[JsonObject]:
    """At most MOST_ROWS rows that contain ``text``."""
    import pyarrow as arrow
    from pyarrow import compute, parquet

    left = MOST_ROWS
    wanted = dict.fromkeys(_TEXTS, text) | {_CONVERSATION: in_messages(text)} if text else {}
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH, columns=[*{*_COLUMNS, *wanted}]):
            part = arrow.table(batch)
            if wanted:
                hits = [compute.match_substring(part[name], words, ignore_case=True) for name, words in wanted.items()]
                found = reduce(compute.or_, (hit.fill_null(False) for hit in hits))
                part = part.filter(found).drop_columns([_CONVERSATION])
            for name in _TEXTS:
                short = compute.utf8_slice_codeunits(part[name], 0, PREVIEW)
                part = part.set_column(part.schema.get_field_index(name), name, short)
            turns = compute.list_value_length(part["turns"])
            part = part.set_column(part.schema.get_field_index("turns"), "turns", turns)
            rows = part.slice(0, left).to_pylist()
            left -= len(rows)
            yield from rows
            if left <= 0:
                return
