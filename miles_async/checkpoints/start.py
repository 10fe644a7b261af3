"""Meaning of ``--save`` and ``--load``, known before anything starts.

Only paths, nothing heavy, milliseconds: ``--dry-run`` asks here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from miles_async.arguments.live import IN_FORCE
from miles_async.checkpoints.files import (
    POSITION_FILE,
    Checkpoint,
    PositionFile,
    describe_disk,
    find_checkpoint,
    free_bytes,
    in_the_way,
    list_checkpoints,
    readable_size,
)
from miles_async.checkpoints.manifest import check_whole
from miles_async.checkpoints.save_lock import lock_problem
from miles_async.errors import CheckpointError, DataError
from miles_async.ledger.readmission import read_readmissions
from miles_async.types import JsonObject, KeptSetting


def where_to_resume(save: Path | None, load: Path | None) -> Path | None:
    """Return ``load``; None if that is where the run saves, and nothing was saved there yet: the run begins.

    So the same command begins a run and resumes it. A directory that cannot be read is refused elsewhere.
    """
    if load is not None and save is not None and load.resolve() == save.resolve():
        with suppress(OSError):
            return load if list_checkpoints(load) else None
    return load


def kept_settings(load: Path | None) -> Mapping[str, KeptSetting]:
    """Settings that ``miles-async set`` changed, in the checkpoint that ``--load`` names, with which the run continues;
    none if it cannot be read, which is refused elsewhere. ``arguments/live.py`` says which of them it takes over.
    """
    if load is None:
        return {}
    try:
        content = (find_checkpoint(load).directory / POSITION_FILE).read_bytes()
        settings = msgspec.json.decode(content, type=PositionFile).settings
        found = msgspec.json.decode(settings, type=dict[str, KeptSetting])
    except (CheckpointError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {name: kept for name, kept in found.items() if name in IN_FORCE}


def resumption_notes(load: Path, num_rollout: int) -> Iterator[str]:
    """Yield that nothing is left to train, if so. A checkpoint that cannot be found is refused elsewhere."""
    with suppress(CheckpointError, OSError):
        step = find_checkpoint(load).step
        if step >= num_rollout:
            yield (
                f"--load {load}: the checkpoint is of step {step}, --num-rollout {num_rollout} is reached: nothing to "
                "train"
            )


def checkpoint_problems(
    *,
    save: Path | None,
    load: Path | None,
    overwrite: bool,
    model: JsonObject,
    least_bytes: int = 0,
    anyway: Collection[str] = (),
) -> Iterator[str]:
    """Why the run cannot resume from ``load``, or not save to ``save``.

    ``model``: its ``fingerprint()``. ``least_bytes``: what a checkpoint takes at least, if there is none to measure.
    ``anyway``: what may differ (``--load-anyway``).
    """
    loaded = None
    if load is not None:
        try:
            loaded = find_checkpoint(load)
            least_bytes = sum(check_whole(loaded, model, anyway).files.values())
            read_readmissions(loaded.directory.parent)
        except (CheckpointError, DataError) as error:
            yield str(error)
            return
    if save is None:
        return
    try:
        if (problem := lock_problem(save)) is not None:
            yield problem
            return
    except OSError as error:
        yield f"--save {save}: cannot tell whether a run saves there: {error}"
        return
    if not overwrite:
        yield from _used_directory(save, loaded)
    if free_bytes(save) < least_bytes:
        yield (
            f"--save {save}: a checkpoint takes {readable_size(least_bytes)} or more, and {describe_disk(save)}: make "
            "room, or choose another disk"
        )


def continues(save: Path | None, loaded: Checkpoint) -> bool:
    """Return whether the run continues in the directory that it resumes from, as the same run."""
    return save is not None and save.resolve() == loaded.directory.parent.resolve()


def _used_directory(save: Path, loaded: Checkpoint | None) -> Iterator[str]:
    same = loaded is not None and continues(save, loaded)
    present = in_the_way(save, loaded.run, loaded.step) if loaded is not None and same else in_the_way(save, None, 0)
    if not present:
        return
    newest = present[-1]
    found = f"--save {save} holds {newest.directory.name} of {f'the run {newest.run}' if newest.run else 'another run'}"
    if loaded is None:
        yield f"{found}: resume it with --load {save}, choose another directory, or replace it with --save-overwrite"
        return
    what = "which came after it" if same and newest.run == loaded.run else "which is not that run"
    yield (
        f"{found}, {what}, and --load takes {loaded.directory}: choose another directory, or replace what is there "
        "with --save-overwrite"
    )
