"""Checkpoint directories: names, owners, positions, which one ``--load`` means, which ones are kept.

Only paths, nothing heavy: ``--dry-run`` asks here too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from miles_async.arguments.surroundings import nearest_existing
from miles_async.errors import CheckpointError

log = structlog.get_logger(__name__)

POSITION_FILE = "position.json"
ROLLOUT_FILE = "rollout.json"
EXAMPLES_FILE = "examples.json"  # instead of it, by --loss-type sft_loss: the cursor alone
TRAINER_FILE = f"trainer/{POSITION_FILE}"
NAME = re.compile(r"iter_(\d+)")
RETIRED = ".old"
LEFTOVER = re.compile(r"iter_\d+\.(partial|old)")  # of a run that was killed while it wrote or removed one


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with the name of a checkpoint."""

    step: int
    directory: Path
    run: str | None  # that saved it; None if its position.json does not say so


class PositionFile(msgspec.Struct):
    """The parts of position.json that are read before anything starts."""

    run: str | None = None
    settings: msgspec.Raw = msgspec.Raw(b"{}")  # by flag, as KeptSetting; other versions may write them otherwise


class _Step(msgspec.Struct):
    step: int


class _Pool(msgspec.Struct):
    steps: int


class _Rollout(msgspec.Struct):
    """The part of rollout.json that is read here."""

    pool: _Pool


def checkpoint_directory(save: Path, step: int) -> Path:
    """Path of the complete checkpoint of ``step``."""
    return save / f"iter_{step:07d}"


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """List the checkpoints in ``directory`` by step; other names are ignored. Raises OSError."""
    if not directory.is_dir():
        return []
    found = [(match, path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted((_checkpoint(match, path) for match, path in found), key=lambda checkpoint: checkpoint.step)


def find_checkpoint(load: Path) -> Checkpoint:
    """Find the checkpoint that ``--load`` names: ``load`` itself, or the newest in it. Raises CheckpointError."""
    match = NAME.fullmatch(load.name)
    try:
        if match and (load / POSITION_FILE).is_file():
            return _checkpoint(match, load)
        checkpoints = list_checkpoints(load)
    except OSError as error:  # another user's, or on a disk that does not answer
        raise CheckpointError(f"--load {load}: cannot be read: {error}") from error
    if not checkpoints:
        raise CheckpointError(f"--load {load}: no checkpoint there (expected a folder iter_NNNNNNN)")
    newest = {checkpoint.run: checkpoint.directory for checkpoint in checkpoints if checkpoint.run is not None}
    if len(newest) > 1:
        listed = ", ".join(f"{directory.name} of {run}" for run, directory in newest.items())
        raise CheckpointError(
            f"--load {load}: expected the checkpoints of one run, found those of {len(newest)} ({listed}): name one, "
            f"as in --load {checkpoints[-1].directory}"
        )
    return checkpoints[-1]


def position_problems(checkpoint: Checkpoint, others: Mapping[str, int]) -> Iterator[str]:
    """Yield which parts are at another step than position.json, or cannot be read. Parts that were not saved are left
    out. ``others``: names of other parts → their steps.
    """
    steps = dict(others)
    for name in (POSITION_FILE, TRAINER_FILE, ROLLOUT_FILE):
        try:
            steps[name] = _read_step(checkpoint.directory / name)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            yield f"{name}: {error}"
    if POSITION_FILE not in steps:
        return
    step = steps.pop(POSITION_FILE)
    for name, other in {**steps, f"the directory's name, {checkpoint.directory.name},": checkpoint.step}.items():
        if other != step:
            yield (
                f"{POSITION_FILE} says step {step}, and {name} says {other}: expected the same, so one of them was "
                "changed, or belongs to another checkpoint"
            )


def in_the_way(save: Path, run: str | None, step: int) -> list[Checkpoint]:
    """Checkpoints in ``save`` that a later ``--load`` would confuse with ``run``'s, which is at ``step``."""
    return [found for found in list_checkpoints(save) if run is None or found.run != run or found.step > step]


def expendable(steps: Iterable[int], *, keep_last: int | None, retain_interval: int | None) -> list[int]:
    """Return the steps whose checkpoints may be removed: neither among the newest ``keep_last`` (1 if only an interval
    is given) nor multiples of ``retain_interval``. Without either, none.
    """
    if keep_last is None and retain_interval is None:
        return []
    older = sorted(steps)[: -(keep_last or 1)]
    return [step for step in older if not (retain_interval and step % retain_interval == 0)]


def start_partial(final: Path) -> Path:
    """Make an empty directory for writing the checkpoint ``final``; remove leftovers of killed runs."""
    partial = final.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(final.parent)
    partial.mkdir()
    return partial


def sweep_leftovers(save: Path) -> None:
    """Remove what runs left half written or half removed in ``save``. Raises OSError for what is half written."""
    for path in save.iterdir():
        if LEFTOVER.fullmatch(path.name):
            if path.suffix == RETIRED:
                _delete(path)
            else:
                shutil.rmtree(path)


def put_in_place(partial: Path, final: Path, replaced: Sequence[Checkpoint]) -> None:
    gone = {checkpoint.directory for checkpoint in replaced} | ({final} if final.exists() else set())
    retired = [_retire(directory) for directory in gone]
    partial.rename(final)
    _sync(final.parent)
    for directory in retired:
        _delete(directory)


def remove(checkpoints: Iterable[Checkpoint]) -> None:
    """Remove checkpoints; one that is half removed no longer counts as a checkpoint."""
    for checkpoint in checkpoints:
        _delete(_retire(checkpoint.directory))


def describe_disk(path: Path) -> str:
    """Describe how full the disk of ``path`` is. Raises nothing, since it is called after another failure there."""
    try:
        usage = shutil.disk_usage(nearest_existing(path))
    except OSError as error:
        return f"its free space is unknown: {error}"
    return f"the disk of {nearest_existing(path)} has {readable_size(usage.free)} of {readable_size(usage.total)} free"


def readable_size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of ``path``, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def _checkpoint(match: re.Match[str], directory: Path) -> Checkpoint:
    try:
        run = msgspec.json.decode((directory / POSITION_FILE).read_bytes(), type=PositionFile).run
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        run = None
    return Checkpoint(int(match[1]), directory, run)


def _retire(directory: Path) -> Path:
    old = directory.with_suffix(RETIRED)
    shutil.rmtree(old, ignore_errors=True)
    return directory.rename(old)


def _delete(retired: Path) -> None:
    """Delete a retired checkpoint. Files that somebody reads on a network disk stay there until a later sweep."""
    try:
        shutil.rmtree(retired)
    except OSError as error:  # no reason to end a run: its newest checkpoint is whole
        log.warning("a removed checkpoint is still on the disk", directory=str(retired), error=str(error))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_step(path: Path) -> int:
    content = path.read_bytes()
    if path.name == ROLLOUT_FILE:
        return msgspec.json.decode(content, type=_Rollout).pool.steps
    return msgspec.json.decode(content, type=_Step).step
