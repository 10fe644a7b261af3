"""Durations that a run measured, for ``miles-async plan --from RUN_DIR``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_async.errors import ConfigurationError, LedgerError
from miles_async.ledger.reader import open_ledger
from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.simulation.distributions import Fixed, Trace, median
from miles_async.types import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds of the parts of a run."""

    response: Trace  # of one sample, from its admission on: queue, environment and reward included
    train: Trace
    publish: Trace | Fixed
    copy_seconds: float


def measured(run_dir: Path) -> Measured:
    """Read ledger and metrics. Raises ConfigurationError naming what the run lacks.

    The ledger knows when a group was admitted and when its last sample was finished; within a group, samples are taken
    to have taken time by their tokens. The first step is left out where there are others: kernels are compiled in it.
    """
    try:
        rows = read_metrics(run_dir / FILE_NAME)
        with open_ledger(run_dir / LEDGER_FILE) as ledger:
            responses = tuple(_responses(ledger.generations()))
    except (OSError, ValueError, LedgerError) as error:
        raise ConfigurationError(
            f"--from {run_dir}: expected a run directory with ledger and metrics: {error}"
        ) from None
    train = _later("time/train_seconds", rows)
    if not responses or not train:
        missing = "no step was trained" if responses else "no group was finished"
        raise ConfigurationError(f"--from {run_dir}: {missing} in this run; name one that trained")
    pauses, copies = _later("publish/pause_seconds", rows), _later("publish/copy_seconds", rows)
    return Measured(
        response=Trace(responses),
        train=Trace(train),
        publish=Trace(pauses) if pauses else Fixed(0.0),
        copy_seconds=sum(copies) / len(copies) if copies else 0.0,
    )


def describe(found: Measured, run_dir: Path) -> str:
    """Describe the measured durations in one paragraph."""
    return (
        f"Measured in {run_dir}: {len(found.response.seconds):,} responses, median {median(found.response):.3g} s "
        f"(queue, environment and reward included), longest {max(found.response.seconds):.3g} s; training step "
        f"{median(found.train):.3g} s; engines paused for {median(found.publish):.3g} s, copy of the weights "
        f"{found.copy_seconds:.3g} s\n"
    )


def _responses(generations: Iterator[tuple[float, Sequence[int]]]) -> Iterator[float]:
    for seconds, lengths in generations:
        longest = max(lengths, default=0)
        yield from (seconds * length / longest for length in lengths if length)


def _later(name: str, rows: Sequence[JsonObject]) -> tuple[float, ...]:
    """Values of a metric, without the first step's if there are more."""
    values = tuple(float(row[name]) for row in rows if row.get(name) is not None)
    return values[1:] or values
