"""The rollout side's part of a checkpoint.

::

    rollout.json     prompt cursor, attempts that are owed to a prompt, counters, quarantine
    groups.msgpack   groups that were finished and not trained yet, tokens included (``serialization.py``)
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from miles_async.errors import CheckpointError
from miles_async.runtime.files.digests import DigestedFile, write_digested
from miles_async.runtime.serialization import read_frames, write_frames
from miles_async.staleness.pool import PoolSnapshot, PoolState
from miles_async.types import Group, JsonObject
from miles_async.types.shared_pictures import restored, slim

STATE_FILE = "rollout.json"
GROUPS_FILE = "groups.msgpack"


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``rollout.json``."""

    source: JsonObject  # the prompt cursor
    pool: PoolState


class RolloutSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the rollout side (C9)."""

    source: JsonObject  # the prompt cursor
    pool: PoolSnapshot


def write_snapshot(directory: Path, snapshot: RolloutSnapshot) -> dict[str, str]:
    """Write the snapshot and sync it to disk. Return digests of its files. Raises CheckpointError."""
    state = SavedState(source=snapshot.source, pool=snapshot.pool.state)
    try:
        digest = write_digested(directory / STATE_FILE, msgspec.json.encode(state))
        with DigestedFile(directory / GROUPS_FILE) as file:
            write_frames(file, map(_slim, snapshot.pool.groups))
            return {STATE_FILE: digest, GROUPS_FILE: file.finish()}
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"cannot write {directory}: a group cannot be saved: {error} (metadata of a sample?)"
        ) from error


def read_snapshot(directory: Path) -> RolloutSnapshot:
    """Raises CheckpointError unless both files are there and whole."""
    try:
        state = read_state(directory)
        with (directory / GROUPS_FILE).open("rb") as file:
            groups = tuple(map(_restored, read_frames(file, Group)))
    except (OSError, EOFError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--load: {directory} is not a complete checkpoint: {error}") from error
    return RolloutSnapshot(source=state.source, pool=PoolSnapshot(state=state.pool, groups=groups))


def _slim(group: Group) -> Group:
    return replace(group, samples=slim(group.samples, group.attempt.prompt.pictures))


def _restored(group: Group) -> Group:
    return replace(group, samples=restored(group.samples, group.attempt.prompt.pictures))


def read_state(directory: Path) -> SavedState:
    """Read the snapshot without its groups. Raises OSError and MsgspecError."""
    return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=SavedState)
