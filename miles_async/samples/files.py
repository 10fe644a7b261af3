"""Where the samples of a run are: one Parquet file per step or evaluation, and the state of the whole.

::

    RUN_DIR/samples/train-00000010.parquet      groups of the batch of step 10
    RUN_DIR/samples/eval-00000010.parquet       the evaluation after 10 steps, all data sets
    RUN_DIR/samples/state.json                  SamplesState

A file has its name once it is whole; until then ``.partial`` follows it, and what a killed run leaves by such a name is
ignored. A step that is written again replaces its file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

from miles_async.samples.columns import Kind

DIRECTORY = "samples"
STATE_FILE = "state.json"
PARTIAL = ".partial"

_NAME = re.compile(rf"({'|'.join(get_args(Kind))})-(\d+)\.parquet")


class SamplesFile(msgspec.Struct, frozen=True, order=True):
    """A file by its name; ordered by step."""

    step: int
    kind: Kind
    path: Path


class SamplesState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the size limit. At the limit every second file of a kind is removed, and from then on only every second
    step of that kind is written (then every fourth ...), so that the files cover the whole run evenly.
    """

    limit_bytes: int
    bytes: int = 0  # of all files
    train_every: int = 1  # of the steps whose samples are kept
    eval_every: int = 1  # of the evaluations
    dropped: int = 0  # steps and evaluations that were not written because the disk was too slow
    stopped: str | None = None  # why nothing more was written, such as a full disk; None: still writing

    @property
    def notes(self) -> list[str]:
        """Which samples the directory lacks, one line per cause; none if it has all."""
        found = [
            f"{kind}: one step of {count} is kept, as all took more than {self.limit_bytes / 2**30:g} GiB"
            for kind, count in (("train", self.train_every), ("eval", self.eval_every))
            if count > 1
        ]
        if self.dropped:
            found.append(f"{self.dropped} batches or parts of evaluations could not be written in time, or at all")
        if self.stopped is not None:
            found.append(f"nothing more was written: {self.stopped}")
        return found


def file_of(directory: Path, kind: Kind, step: int) -> Path:
    """File of a step or evaluation.

    >>> file_of(Path("runs/latest/samples"), "train", 10)
    PosixPath('runs/latest/samples/train-00000010.parquet')
    """
    return directory / f"{kind}-{step:08}.parquet"


def files_in(directory: Path) -> list[SamplesFile]:
    """Whole files of a samples directory, by step; none if there is no such directory."""
    if not directory.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(SamplesFile(int(match[2]), msgspec.convert(match[1], Kind), path) for match, path in matches if match)
