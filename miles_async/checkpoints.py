"""Checkpoints of the whole run: both sides and the loop's position in one directory, whole or absent.

::

    SAVE/iter_0000040/trainer/       weights, optimizer, scheduler, RNG (the backend's format)
    SAVE/iter_0000040/rollout.json   and groups.msgpack: the rollout side (``rollout/checkpoint.py``)
    SAVE/iter_0000040/position.json  step and weight version
    SAVE/readmit.json                prompts that get another budget at the next load (``readmission.py``)

A checkpoint is written to ``iter_0000040.partial`` and renamed when everything is on disk, so a directory with
the final name is whole. Finished groups that wait are saved with their tokens; what was in flight is generated anew.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import msgspec
import structlog

from miles_async.controller import Position
from miles_async.errors import CheckpointError
from miles_async.protocols import RolloutSide, TrainerSide
from miles_async.run.readmission import read_readmissions

log = structlog.get_logger(__name__)


class RunCheckpoints:
    """Saves to ``--save``, loads from ``--load``."""

    def __init__(self, trainer: TrainerSide, rollout: RolloutSide, *, save: Path | None, load: Path | None) -> None:
        self._trainer = trainer
        self._rollout = rollout
        self._save = save
        self._load = load
        self._finishing = asyncio.Lock()
        self._position: Position | None = None  # of a checkpoint that lacks the rollout side's part

    async def save(self, position: Position) -> None:
        """Everything as of now, the trainer's part on disk: training may go on. Raises CheckpointError."""
        await self.finish()  # the one before
        partial = self._directory(position).with_suffix(".partial")
        try:
            await asyncio.to_thread(_make_empty, partial)
        except OSError as error:
            raise CheckpointError(f"--save {self._save}: {error}") from error
        await self._rollout.snapshot()
        await self._trainer.save(partial / "trainer")
        self._position = position

    async def finish(self) -> None:
        """Until what was saved is whole. Raises CheckpointError naming the directory."""
        async with self._finishing:
            if (position := self._position) is None:
                return
            final = self._directory(position)
            partial = final.with_suffix(".partial")
            try:
                await self._rollout.save(partial)
                await asyncio.to_thread(_write, partial / "position.json", msgspec.json.encode(position))
                await asyncio.to_thread(_replace, partial, final)
            except OSError as error:
                raise CheckpointError(f"--save {self._save}: {error}") from error
            self._position = None
            log.info("checkpoint saved", directory=str(final))

    async def load(self) -> Position | None:
        """Restore both sides from the newest whole checkpoint. None without ``--load``."""
        if self._load is None:
            return None
        directory = await asyncio.to_thread(newest_checkpoint, self._load)
        position = (await asyncio.to_thread(_read_position, directory)).resumed()
        readmissions = await asyncio.to_thread(read_readmissions, self._load)
        await self._trainer.load(directory / "trainer")
        await self._rollout.load(directory, step=position.step, version=position.version, readmissions=readmissions)
        log.info("resumed", directory=str(directory), step=position.step, version=position.version)
        return position

    def _directory(self, position: Position) -> Path:
        assert self._save is not None
        return self._save / f"iter_{position.step:07d}"


def newest_checkpoint(directory: Path) -> Path:
    """The whole checkpoint with the highest step. Raises CheckpointError if there is none."""
    whole = sorted(path for path in directory.glob("iter_*") if not path.suffix and path.is_dir())
    if not whole:
        raise CheckpointError(f"--load {directory}: no checkpoint there (expected a folder iter_NNNNNNN)")
    return whole[-1]


def _read_position(directory: Path) -> Position:
    try:
        return msgspec.json.decode((directory / "position.json").read_bytes(), type=Position)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"--load: {directory} is no whole checkpoint: {error}") from error


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replace(partial: Path, final: Path) -> None:
    old = final.with_suffix(".old")
    if final.exists():  # a run that resumed before this step and came here again
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
