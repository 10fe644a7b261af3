"""``readmit.json`` next to the checkpoints: quarantined prompts to readmit.

``miles-async ledger DIR --readmit`` adds a request, the next ``--load`` reads all of them. The attempt book notes in
its own state, hence in every later checkpoint, which requests it has granted (``AttemptBook.readmit``). So a request
counts once per line of checkpoints, whichever of them is loaded, and a prompt that fails again stays out.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from miles_async.errors import CheckpointError, DataError
from miles_async.runtime.files.whole_file import write_whole

READMIT_FILE = "readmit.json"


def read_readmissions(save: Path) -> dict[str, tuple[str, ...]]:
    """Read the requests: id → prompt ids, oldest first; {} without a file. Raises DataError for another format."""
    path = save / READMIT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[str, ...]])
    except FileNotFoundError:
        return {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected request ids with lists of prompt ids: {error}") from error


def request_readmission(save: Path, prompt_ids: Sequence[str]) -> Path:
    """Add one request, atomically. Returns the file. Raises CheckpointError."""
    requests: Mapping[str, Sequence[str]] = {**read_readmissions(save), uuid.uuid4().hex: prompt_ids}
    path = save / READMIT_FILE
    try:
        save.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(requests) + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return path
