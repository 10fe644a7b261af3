"""TensorBoard: event files in a directory, written without TensorFlow and without PyTorch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.metrics_file import kind_of

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

_PREFIX = "events.out.tfevents."
_VERSION = "brain.Event:2"


def tensorboard_directory(arguments: ObservabilityArguments, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the flags, else of TENSORBOARD_DIR, else ``tensorboard/`` in the run directory."""
    if arguments.tensorboard_dir is not None:
        return arguments.tensorboard_dir
    named = environment.get("TENSORBOARD_DIR")
    return Path(named) if named else arguments.run_dir / "tensorboard"


class TensorBoardTracker:
    """The Tracker itself, synchronous: each call of :meth:`log` is one event, on disk when it returns.

    A directory that has event files is continued. TensorBoard then hides their steps from the first new one on, since
    a resumed run repeats the steps after its checkpoint.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open an event file. Raises OSError, and ImportError without the package."""
        directory.mkdir(parents=True, exist_ok=True)
        self._continued = any(directory.glob(f"{_PREFIX}*"))
        origin = f"{socket.gethostname()}.{os.getpid()}"
        # TensorBoard reads them in this order.
        self._paths = (directory / f"{_PREFIX}{int(clock()):010d}.{origin}.{number}" for number in count())
        self._clock = clock
        self._records: RecordWriter | None = self._open()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write the metrics of a step. Raises OSError, as of a full disk; the next call begins a new file then."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._records = self._open()
        if self._continued:
            first_new = step if kind_of(metrics) == "step" else step + 1  # an evaluation comes after its step
            self._write(Event(step=first_new, session_log=SessionLog(status=SessionLog.START)))
            self._continued = False
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def finish(self) -> None:
        if self._records is not None:
            self._records.close()

    def _open(self) -> RecordWriter:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._records = RecordWriter(next(self._paths).open("xb"))
        self._write(Event(file_version=_VERSION))
        return self._records

    def _write(self, event: Event) -> None:
        assert self._records is not None
        event.wall_time = self._clock()
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError:  # half a record may be in the file, and readers stop there
            with suppress(OSError):
                self._records.close()
            self._records = None
            raise
