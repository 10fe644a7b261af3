"""``miles-async replay``: repeat the decisions of a run with ``--record`` and compare them. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from miles_async.commands.parser import CommandParser
from miles_async.errors import ConfigurationError
from miles_async.runtime.files.run_directory import check_directory
from miles_async.wiring.replay import Replay, ReplayedBatch


def replay(words: Sequence[str]) -> Iterator[str]:
    """Yield the output of ``miles-async replay`` as it proceeds.

    Raises:
        ConfigurationError: there is no such directory, or no schedule in it.
        ScheduleError: the schedule is damaged.
        ReplayDifference: a decision or a batch is not what it was.
    """
    parser = CommandParser(
        prog="miles-async replay",
        description="Repeat every decision of a run with --record, without engines and trainer, and compare attempts, "
        "the order of groups and the bits of batches.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write each step's batch to DIR/step-000001.npz")
    parsed = parser.parse_args(words)
    check_directory(parsed.directory)
    run = Replay.of_run(parsed.directory)
    steps: list[int] = []
    for batch in run:
        steps.append(batch.step)
        if parsed.output:
            write_batch(parsed.output, batch)
        samples = sum(len(group.samples) for group in batch.groups)
        yield (
            f"step {batch.step}: {len(batch.groups)} groups, {samples} samples, "
            f"{len(batch.batch.tokens)} tokens for version {batch.target_version}: identical\n"
        )
    replayed = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    yield f"{replayed}, {run.finished_groups} finished groups, {run.frames} frames: all identical\n"
    if not run.complete:
        yield f"the schedule ends with frame {run.frames}, in step {run.step}: the run was killed, or still runs\n"


def write_batch(directory: Path, batch: ReplayedBatch) -> Path:
    """Write all arrays of the batch, in the order of its groups, before the split over ranks (``types.TrainBatch``),
    ``attempt_ids`` int64 [S] and ``target_version``. Of images it has the digests, a text per branch. Returns the
    file. Raises ConfigurationError.
    """
    path = directory / f"step-{batch.step:06}.npz"
    ids = [group.attempt.attempt_id for group in batch.groups for s in group.samples for _ in s.branches]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        arrays = msgspec.structs.asdict(batch.batch)
        if (pictures := batch.batch.pictures) is not None:
            arrays["pictures"] = np.array([" ".join(picture.digest for picture in own) for own in pictures])
        np.savez_compressed(
            path,
            **arrays,
            attempt_ids=np.array(ids, np.int64),
            target_version=np.array(batch.target_version),
        )
    except OSError as error:
        raise ConfigurationError(f"--output {directory}: {error}") from error
    return path
