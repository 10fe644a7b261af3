"""Settings that ``miles-async set`` changed, in a checkpoint: a run that resumes continues with them.

``arguments/live.py`` says which of them it takes over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from miles_async.arguments.live import IN_FORCE
from miles_async.checkpoints.files import POSITION_FILE, find_checkpoint
from miles_async.errors import CheckpointError
from miles_async.types import KeptSetting


class _Position(msgspec.Struct):
    """The part of position.json that is read here."""

    settings: dict[str, KeptSetting] = {}


def kept_settings(load: Path | None) -> Mapping[str, KeptSetting]:
    """Settings of the checkpoint that ``--load`` names; none if it cannot be read, which is refused elsewhere."""
    if load is None:
        return {}
    try:
        content = (find_checkpoint(load).directory / POSITION_FILE).read_bytes()
        found = msgspec.json.decode(content, type=_Position).settings
    except (CheckpointError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {name: kept for name, kept in found.items() if name in IN_FORCE}
