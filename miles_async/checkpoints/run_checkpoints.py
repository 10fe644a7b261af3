"""Saves and loads checkpoints of the whole run, for the controller."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.checkpoints.files import (
    POSITION_FILE,
    Checkpoint,
    checkpoint_directory,
    describe_disk,
    expendable,
    find_checkpoint,
    in_the_way,
    list_checkpoints,
    position_problems,
    put_in_place,
    remove,
    start_partial,
)
from miles_async.checkpoints.manifest import Manifest, RunIdentity, check_trainer_files, check_whole, write_manifest
from miles_async.checkpoints.model_function import differing
from miles_async.checkpoints.save_lock import SaveLock
from miles_async.checkpoints.start import continues
from miles_async.errors import CheckpointError
from miles_async.ledger.readmission import read_readmissions
from miles_async.runtime.clock import Stopwatch
from miles_async.runtime.files.digests import write_digested
from miles_async.seams import Position, Resumption, SavedSide, TrainerSide
from miles_async.types import KeptSetting

log = structlog.get_logger(__name__)

TRAINER = "trainer"  # directory of the trainer's part
SEEDED_BY = ("DP", "TP", "PP", "CP")  # sizes of the grid of ranks whose random generators are saved


class SavedPosition(Position, frozen=True, kw_only=True):
    """Contents of position.json."""

    run: str
    settings: Mapping[str, KeptSetting] = {}  # changed by `miles-async set`


class RunCheckpoints:
    """Saves to ``--save``, loads from ``--load``, removes what ``--save-keep-last`` and the like don't keep."""

    def __init__(
        self,
        trainer: TrainerSide,
        rollout: SavedSide | None,
        arguments: CheckpointArguments,
        identity: RunIdentity,
        lock: SaveLock | None = None,
        settings: Callable[[], Mapping[str, KeptSetting]] = dict,
    ) -> None:
        """``rollout``: the rollout side, or what stands for it; None if nothing is saved.

        ``identity``: of this run, unless it continues in the directory that it resumes from. ``lock``: of ``--save``,
        without which nothing is written there; None where no other run can be. ``settings``: those in force that
        are not what flags say.
        """
        self._trainer = trainer
        self._rollout = rollout
        self._arguments = arguments
        self._identity = identity
        self._lock = lock
        self._settings = settings
        self._saved_settings: Mapping[str, KeptSetting] = {}  # of the last save
        self._finishing = asyncio.Lock()
        self._position: Position | None = None  # of the last save, until it is whole
        self._watch = Stopwatch()  # of the last save
        self._digests: dict[str, str] = {}  # of its files, by path
        self._replaces = arguments.save_overwrite  # until this run's first checkpoint is there

    async def save(self, position: Position) -> None:
        """Snapshot the current state of both sides; return once training may resume.

        That is when the trainer's part is copied, or without ``--async-save`` on disk. Waits for the save before it.
        Raises CheckpointError.
        """
        assert self._rollout is not None
        watch, final = Stopwatch(), self._final(position)
        with watch.timed("blocked"):
            if self._position is not None:
                log.warning("a checkpoint waits until the previous one is complete", waits=final.name)
                with watch.timed("previous"):
                    await self.finish()
            try:
                await asyncio.to_thread(self._check_lock)
                partial = await asyncio.to_thread(start_partial, final)
                await self._rollout.snapshot()
                self._digests = {}
                if self._arguments.async_save:
                    await self._trainer.stage_save(partial / TRAINER)
                else:
                    self._digests = _below(TRAINER, await self._trainer.save(partial / TRAINER))
            except (OSError, CheckpointError) as error:
                raise await self._failure(final, error) from error
        self._position, self._watch, self._saved_settings = position, watch, self._settings()

    async def finish(self) -> Mapping[str, float]:
        """Wait for the last save. Returns its metrics, or none if it had finished already. Raises CheckpointError."""
        async with self._finishing:
            if (position := self._position) is None:
                return {}
            final = self._final(position)
            with self._watch.timed("write"):
                try:
                    assert self._rollout is not None
                    self._digests |= await self._rollout.save(final.with_suffix(".partial"))
                    if self._arguments.async_save:
                        self._digests |= _below(TRAINER, await self._trainer.write_save())
                    await asyncio.to_thread(self._complete, position, final)
                except (OSError, CheckpointError) as error:
                    raise await self._failure(final, error) from error
            self._position = None
            log.info("checkpoint saved", directory=str(final))
            return self._watch.metrics("checkpoint")

    async def load(self) -> Position | None:
        """Restore both sides; None without ``--load``. Raises CheckpointError."""
        if (load := self._arguments.load) is None:
            return None
        loaded, manifest, position, accepted = await asyncio.to_thread(self._read, load)
        readmissions = await asyncio.to_thread(read_readmissions, loaded.directory.parent)
        try:
            await self._check_trainer_files(loaded, manifest)
            await self._trainer.load(loaded.directory / TRAINER, step=position.step)
        except CheckpointError as error:
            raise CheckpointError(f"--load {load}: {error}") from error
        if self._rollout is not None:
            resumption = Resumption(
                step=position.step, version=position.version, readmissions=readmissions, accepted=accepted
            )
            await self._rollout.load(loaded.directory, resumption)
        if continues(self._arguments.save, loaded):
            assert loaded.run is not None, "check_whole() saw to that"
            self._identity = RunIdentity(run=loaded.run, model=self._identity.model, ranks=self._identity.ranks)
        self._note_layout(manifest)
        log.info("resumed", directory=str(loaded.directory), step=position.step, version=position.version)
        return position

    def _read(self, load: Path) -> tuple[Checkpoint, Manifest, Position, tuple[str, ...]]:
        """Also returns the changes of the model that ``--load-anyway`` accepted."""
        loaded = find_checkpoint(load)
        anyway = self._arguments.load_anyway
        manifest = check_whole(loaded, self._identity.model, anyway)
        accepted = tuple(differing(manifest.model, self._identity.model).values()) if anyway else ()
        if accepted:
            log.warning("resumed with another model than was saved, by --load-anyway", changed=list(accepted))
        try:
            position = msgspec.json.decode((loaded.directory / POSITION_FILE).read_bytes(), type=SavedPosition)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"--load {loaded.directory}: {POSITION_FILE}: {error}") from error
        return loaded, manifest, position.resumed(), accepted

    async def _check_trainer_files(self, loaded: Checkpoint, manifest: Manifest) -> None:
        """Compare digests; the ranks read the files side by side. Raises CheckpointError."""
        watch = Stopwatch()
        with watch.timed("check"):
            found = await self._trainer.digests(loaded.directory, manifest.select(trainer=True))
        check_trainer_files(loaded, manifest, found)
        log.info("digests of the trainer's files compared", seconds=round(watch.seconds["check"], 1))

    def _note_layout(self, manifest: Manifest) -> None:
        saved, ours = manifest.ranks, dict(self._identity.ranks)
        if saved != ours:
            reseeded = any(saved.get(name) != ours.get(name) for name in SEEDED_BY)
            generators = "seeded again" if reseeded else "restored"
            log.warning("checkpoint from another layout of ranks", saved=saved, now=ours, random_generators=generators)

    def _complete(self, position: Position, final: Path) -> None:
        """Write the last files, rename, and remove expired checkpoints."""
        run, partial = self._identity.run, final.with_suffix(".partial")
        saved = SavedPosition(**msgspec.structs.asdict(position), run=run, settings=self._saved_settings)
        digests = self._digests | {POSITION_FILE: write_digested(partial / POSITION_FILE, msgspec.json.encode(saved))}
        if problems := list(position_problems(Checkpoint(position.step, partial, run), {})):
            raise CheckpointError("; ".join(problems))
        write_manifest(partial, self._identity, position.step, digests)
        replaced = in_the_way(final.parent, run, position.step)
        if replaced and not self._replaces:
            raise CheckpointError(f"{replaced[-1].directory} belongs to run {replaced[-1].run}: two runs save there")
        self._check_lock()
        put_in_place(partial, final, replaced)
        self._replaces = False
        checkpoints = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(final.parent)}
        keep_last, interval = self._arguments.save_keep_last, self._arguments.save_retain_interval
        remove(checkpoints[step] for step in expendable(checkpoints, keep_last=keep_last, retain_interval=interval))

    async def _failure(self, final: Path, error: Exception) -> CheckpointError:
        """Return ``error`` with flag, directory and disk. Removes the partial files, which waste a full disk."""
        self._position = None
        disk = await asyncio.to_thread(describe_disk, final)
        with suppress(OSError, CheckpointError):
            await asyncio.to_thread(self._check_lock)  # else it is another run's by now
            await asyncio.to_thread(shutil.rmtree, final.with_suffix(".partial"), ignore_errors=True)
        return CheckpointError(f"--save {self._arguments.save}: {final.name} was not saved: {error}; {disk}")

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _final(self, position: Position) -> Path:
        assert self._arguments.save is not None
        return checkpoint_directory(self._arguments.save, position.step)


def _below(directory: str, digests: Mapping[str, str]) -> dict[str, str]:
    return {f"{directory}/{name}": digest for name, digest in digests.items()}
