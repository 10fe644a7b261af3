"""Repeat every decision of a recorded run with the same code, and compare: which attempt was issued, which groups a
batch got and in which order, which groups were swept, trimmed or given up, and the batches themselves, to the last bit.

The run's inputs (prompts, finished groups with their tokens, failures, commits) are read from its schedule
(``ledger/schedule.py``), so no engine, trainer or clock is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import cast

import msgspec

from miles_async.arguments.parser import parse_arguments
from miles_async.errors import ConfigurationError, MilesAsyncError, ReplayDifference, ScheduleError
from miles_async.ledger.schedule import (
    AnyCall,
    BatchFrame,
    Cancelled,
    Changed,
    Committed,
    Cut,
    Decisions,
    Failed,
    Filtered,
    Finished,
    Frame,
    Issued,
    Offered,
    PoolFrame,
    Record,
    Restored,
    Reviewed,
    Trained,
    attempt_ids,
)
from miles_async.runtime.files.run_directory import CONFIG_FILE, SCHEDULE_FILE
from miles_async.runtime.serialization import encode, read_frames
from miles_async.staleness.pool import Pool, PoolSnapshot
from miles_async.train_data.batch import digests
from miles_async.train_data.batch_maker import BatchMaker
from miles_async.types import Attempt, Group, Prompt, TrainBatch, TrainShard
from miles_async.wiring.decisions import make_batches, make_pool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedBatch:
    """One batch, made again and equal to the one that the run trained on."""

    step: int
    target_version: int  # the optimizer stepped from it
    groups: tuple[Group, ...]
    batch: TrainBatch  # all samples in the order of the groups, before the split
    shards: tuple[TrainShard, ...]  # by data-parallel rank
    digests: Mapping[str, str]  # of the shards


class Replay:
    """Iterate over it for the batches of a schedule; its fields then say how far the schedule went.

    >>> for batch in Replay.of_run(Path("runs/latest")):
    ...     print(batch.step, batch.batch.rewards.mean())
    """

    def __init__(self, path: Path, make_pool: Callable[[Record], Pool], batches: BatchMaker) -> None:
        """``make_pool``, ``batches``: as in the run. The pool passes its decisions to ``Record``."""
        self.frames = 0  # read until now
        self.step = 1  # whose batch is being collected
        self.finished_groups = 0
        self.complete = False  # the run ended by itself, if only by an error or Ctrl-C
        self._path = path
        self._pool = make_pool(self._note)
        self._batches = batches
        self._decided: list[Decisions] = []
        self._cut: dict[tuple[int, ...], tuple[int, int, tuple[Group, ...]]] = {}  # step, target version, groups

    @classmethod
    def of_run(cls, run_dir: Path) -> Replay:
        """Replay the run with the flags in its directory. Raises ConfigurationError if it was not recorded."""
        path = run_dir / SCHEDULE_FILE
        if not path.is_file():
            raise ConfigurationError(f"expected a run with --record, found no {SCHEDULE_FILE} in {run_dir}")
        arguments = parse_arguments(["--config", str(run_dir / CONFIG_FILE)]).arguments
        return cls(
            path,
            lambda record: make_pool(
                arguments.rollout, arguments.staleness, group_filter=arguments.rewards.group_filter, record=record
            ),
            make_batches(arguments),
        )

    def __iter__(self) -> Iterator[ReplayedBatch]:
        """Replay once. An incomplete last frame, of a run that was killed while writing, is the end.

        Raises:
            ReplayDifference: at the first decision or batch that differs.
            ScheduleError: the file is damaged.
        """
        for frame in self._read():
            if isinstance(frame, PoolFrame):
                self._decide(frame)
            else:
                yield self._make(frame)

    def _read(self) -> Iterator[Frame]:
        try:
            with self._path.open("rb") as file:
                for frame in read_frames(file, cast(type[Frame], Frame)):
                    self.frames += 1
                    yield frame
        except EOFError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            raise ScheduleError(f"{self._path}: cannot read frame {self.frames + 1}: {error}") from error

    def _note(self, call: AnyCall, decisions: Decisions) -> None:
        self._decided.append(decisions)

    def _decide(self, frame: PoolFrame) -> None:
        step = self.step
        with suppress(Exception):  # supervision point: what a call raises is in the decisions that are compared
            self._tell(frame.call)
        if not self._decided:
            raise ScheduleError(f"{self._path}: frame {self.frames} does not follow: {_brief(frame.call)}")
        if difference := _difference(frame.decisions, self._decided.pop()):
            raise ReplayDifference(f"step {step}, frame {self.frames}: after {_brief(frame.call)} {difference}")

    def _tell(self, call: AnyCall) -> None:
        pool = self._pool
        match call:
            case Offered():
                pool.offer(call.epoch, call.prompt)
            case Issued():
                pool.issue(call.visible_version)
            case Finished():
                self.finished_groups += 1
                pool.finished(call.group)
            case Failed():
                pool.failed(call.attempt, call.reason, infrastructure=call.infrastructure)
            case Filtered():
                pool.filtered(call.attempt, call.reason, call.group)
            case Reviewed():
                pool.review(call.attempt_id, call.versions, call.target_version)
            case Cut():
                if groups := pool.cut(call.target_version):
                    self._cut[attempt_ids(groups)] = (self.step, call.target_version, groups)
                    self.step += 1
            case Trained():
                _, _, groups = self._cut.pop(call.attempt_ids)
                pool.trained(groups, call.target_version)
            case Committed():
                pool.commit(call.version)
            case Restored():
                self.step = call.snapshot.state.steps + 1
                pool.restore(
                    call.snapshot,
                    version=call.version,
                    total_groups=call.total_groups,
                    readmissions=call.readmissions,
                )
            case Changed():
                pool.change(call.changes)
                self._batches = replace(self._batches, bound=call.changes.bound(self._batches.bound))
            case Cancelled():
                self.complete = True
                pool.cancel_all()

    def _make(self, frame: BatchFrame) -> ReplayedBatch:
        if frame.attempt_ids not in self._cut:
            raise ScheduleError(f"{self._path}: frame {self.frames} does not follow: no such batch was cut")
        step, target_version, groups = self._cut[frame.attempt_ids]
        try:
            shards = replace(self._batches, quadratic_work=frame.quadratic_work).shards(groups, target_version)
        except MilesAsyncError as error:
            raise ReplayDifference(f"step {step}, frame {self.frames}: expected a batch, found {error}") from error
        found = digests(shards)
        if different := [name for name in frame.digests | found if found.get(name) != frame.digests.get(name)]:
            left, right = ({name: side.get(name) for name in different} for side in (frame.digests, found))
            raise ReplayDifference(f"step {step}, frame {self.frames}: expected a batch with {left}, found {right}")
        return ReplayedBatch(
            step=step,
            target_version=target_version,
            groups=groups,
            batch=self._batches.flatten(groups),
            shards=shards,
            digests=found,
        )


# -------------------------------------------------------------------------------------------------------- in words
def _brief(value: object) -> str:
    """A call without tokens."""
    match value:
        case Prompt():
            return value.prompt_id
        case Attempt():
            return str(value.attempt_id)
        case Group():
            return _brief(value.attempt)
        case PoolSnapshot():
            return f"{len(value.groups)} groups"
        case msgspec.Struct():
            fields = ", ".join(f"{name}={_brief(getattr(value, name))}" for name in value.__struct_fields__)
            return f"{type(value).__name__.lower()}({fields})"
    return str(value)


def _difference(expected: object, found: object) -> str | None:
    """Describe the first difference, or return None if equal. NaN, which may be in metadata, equals NaN."""
    if encode(expected) == encode(found):
        return None
    path, left, right = _first_difference(_plain(expected), _plain(found))
    return f"expected {path} {left!r:.500}, found {right!r:.500}"


def _plain(value: object) -> object:
    return msgspec.msgpack.decode(encode(value))


def _first_difference(expected: object, found: object, path: str = "") -> tuple[str, object, object]:
    match expected, found:
        case dict(), dict():
            pairs = [(f"{path}.{key}", expected.get(key), found.get(key)) for key in {**expected, **found}]
        case [{}, *_], list():
            pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip_longest(expected, found))]
        case _:
            return path.removeprefix("."), expected, found
    different = next(pair for pair in pairs if encode(pair[1]) != encode(pair[2]))
    return _first_difference(different[1], different[2], different[0])
