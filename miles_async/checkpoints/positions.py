"""How far each part of a checkpoint says that it is: all parts must agree with position.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from miles_async.checkpoints.files import POSITION_FILE, Checkpoint

MANIFEST_FILE = "manifest.json"
ROLLOUT_FILE = "rollout.json"
TRAINER_FILE = f"trainer/{POSITION_FILE}"


class _Step(msgspec.Struct):
    step: int


class _Pool(msgspec.Struct):
    steps: int


class _Rollout(msgspec.Struct):
    """The part of rollout.json that is read here."""

    pool: _Pool


def position_problems(checkpoint: Checkpoint, manifest_step: int | None) -> Iterator[str]:
    """Yield which parts are at another step than position.json, or not to be read.

    ``manifest_step``: None in a manifest of an earlier version. Parts that were not saved are left out.
    """
    steps: dict[str, int] = {}
    for name in (POSITION_FILE, TRAINER_FILE, ROLLOUT_FILE):
        try:
            steps[name] = _read(checkpoint.directory / name)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            yield f"{name}: {error}"
    if POSITION_FILE not in steps:
        return
    if manifest_step is not None:
        steps[MANIFEST_FILE] = manifest_step
    step = steps.pop(POSITION_FILE)
    for name, other in {**steps, f"the directory's name, {checkpoint.directory.name},": checkpoint.step}.items():
        if other != step:
            yield (
                f"{POSITION_FILE} says step {step}, and {name} says {other}: expected the same, so one of them was "
                "changed, or is of another checkpoint"
            )


def _read(path: Path) -> int:
    content = path.read_bytes()
    if path.name == ROLLOUT_FILE:
        return msgspec.json.decode(content, type=_Rollout).pool.steps
    return msgspec.json.decode(content, type=_Step).step
