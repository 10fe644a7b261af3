"""Data sets of the Hugging Face hub, and folders that ``save_to_disk`` of ``datasets`` wrote.

``datasets`` is an extra, imported when it is needed: in the processes that read prompts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_files import HubName
from miles_async.errors import DataError
from miles_async.prompts.files import file_digest
from miles_async.prompts.tables import Columns, TableRows

if TYPE_CHECKING:
    import datasets
    import pyarrow

HUB_SECONDS = 30.0  # to ask the hub for the newest commit


def hub_rows(name: HubName, place: str, arguments: DataArguments) -> TableRows:
    """Rows of a data set, downloaded to the cache of ``datasets``. Raises DataError."""
    library = _library(place)
    try:
        commit = _commit(name)
        found = library.load_dataset(name.name, name.config, split=name.split, revision=commit)
    except Exception as error:  # supervision point: the hub, its client and readers of formats raise anything
        raise DataError(f"{place}: cannot be read: {type(error).__name__}: {error}") from error
    config = f":{name.config}" if name.config else ""
    rows = _rows(found, place, f"{name.name}{config}:{name.split}", f"{commit}{config}:{name.split}", arguments)
    rows.revision = commit
    return rows


def saved_rows(folder: Path, arguments: DataArguments) -> TableRows:
    """Rows of a folder. Raises DataError."""
    library = _library(str(folder))
    try:
        found = library.load_from_disk(str(folder))
    except Exception as error:  # supervision point: as above
        raise DataError(f"{folder}: expected a folder that datasets saved (save_to_disk): {error}") from error
    if isinstance(found, dict):
        splits = ", ".join(f"{folder}/{split}" for split in found)
        raise DataError(f"{folder}: holds several splits: give one of {splits}")
    return _rows(found, str(folder), folder.name, file_digest(*sorted(folder.glob("*.arrow"))), arguments)


def _rows(found: datasets.Dataset, place: str, label: str, digest: str, arguments: DataArguments) -> TableRows:
    table: pyarrow.Table = found.with_format("arrow")[:]
    columns = Columns(table.schema, arguments, place)
    return TableRows(place, label, digest, [table.select(columns.names)], columns)


def _commit(name: HubName) -> str:
    """The commit of the revision. A revision that is a commit is not looked up, so the cache is enough."""
    from huggingface_hub import HfApi

    if name.revision is not None and re.fullmatch(r"[0-9a-f]{40}", name.revision):
        return name.revision
    commit = HfApi().dataset_info(name.name, revision=name.revision, timeout=HUB_SECONDS).sha
    if commit is None:
        raise ValueError("the hub names no commit")
    return commit


def _library(place: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{place}: needs the package datasets: pip install 'miles-async[datasets]'") from None
    datasets.disable_progress_bars()
    return datasets
