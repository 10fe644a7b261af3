"""One run: what it has measured and written, and its end."""

from __future__ import annotations

import subprocess
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from miles_async.errors import ConfigurationError, MilesAsyncError, StalledError
from miles_async.observability.metrics_file import FILE_NAME
from miles_async.observability.summary import Summary
from miles_async.runs.ending import STOP_SECONDS, end_run
from miles_async.runs.records import POLL_SECONDS, Metrics, Records
from miles_async.runtime.files.run_directory import find_run
from miles_async.runtime.network.control import call
from miles_async.runtime.processes.run_process import control_of
from miles_async.samples.query import Query, find
from miles_async.samples.reader import read_rows, read_summaries
from miles_async.watch.status import State, Status, read_status, state_of
from miles_async.watch.status import read_rows as read_metric_rows


def attach(run_dir: str | Path) -> Run:
    """Open the directory of a run that is live or over, such as after a restart of the notebook's kernel.

    Raises ConfigurationError: it is not the directory of a run.
    """
    directory = Path(run_dir).absolute()
    find_run(directory)
    return Run(directory)


class Run:
    """A run that was started or attached to. It continues without this object; as a context manager it ends with it."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        """``process``: the ``miles-async train`` that this program started."""
        self.directory = directory
        self._process = process

    def __repr__(self) -> str:
        return f"<Run {self.directory}: {self.state}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def state(self) -> State:
        """Whether the run is live.

        ``restarting``: between two lives with ``--max-run-restarts``, as an attached run shows it. ``unknown``: its
        driver is on another machine and has written no end.
        """
        if self._process is not None:
            return "running" if self._process.poll() is None else "over"
        try:
            _, process = find_run(self.directory)
        except ConfigurationError:  # it was removed
            return "over"
        return state_of(process, {**(self.summary or {})})

    @property
    def status(self) -> Status:
        """Where the run stands, as ``miles-async status`` shows it."""
        directory, process = find_run(self.directory)
        return read_status(directory, process, read_metric_rows(directory))

    @property
    def summary(self) -> Summary | None:
        """Content of summary.json, which the run writes at its end; None before."""
        with suppress(FileNotFoundError):
            return msgspec.json.decode((self.directory / "summary.json").read_bytes(), type=Summary)
        return None

    def metrics(self, *, follow: bool = True) -> Metrics:
        """The metrics, line by line; a loop over them, or ``async for``, ends with the run.

        ``follow=False``: the loop ends with the last line that is there.
        """
        return Metrics(self.directory, lambda: self.state == "over", follow=follow)

    def samples(self, *, tokens: bool = False, **conditions: Any) -> Records:
        """Samples that meet all conditions, by step, one record per branch (docs/samples.md has the columns).

        ``conditions``: fields of :class:`miles_async.samples.query.Query`, such as ``kind="eval"``, ``steps=[10]``,
        ``reward=(0, 0.5)`` or ``text="word"``. ``tokens``: with the columns that have an entry per token.
        """
        read = read_rows if tokens else read_summaries
        rows = find(self.directory, Query(**conditions), lambda error: warnings.warn(str(error), stacklevel=3), read)
        return Records(msgspec.structs.asdict(row) for row in rows)

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait for the end of the run and return its summary. An interrupt ends the waiting, not the run.

        Raises:
            MilesAsyncError: the run failed, or was killed.
            TimeoutError: it is still running after ``timeout`` seconds.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while self.state != "over":
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self!r} after {timeout:g} s; its metrics are in {self.directory / FILE_NAME}")
            time.sleep(POLL_SECONDS)
        summary = self.summary
        if summary is None:
            raise MilesAsyncError(f"the run was killed: it wrote no summary; see {self.directory / 'logs'}")
        if "error" in summary:
            raise MilesAsyncError(f"the run {summary.get('ending')}: {summary['error']}")
        return summary

    def set(self, **changes: float | str | None) -> str:
        """Change settings of the live run, all of them or none, as ``miles-async set`` does: flags such as
        ``lr=1e-6``, or requests such as ``checkpoint="now"``. Without changes, list the settings.

        Returns the run's answer. Raises ConfigurationError: it refuses a change, is over, or on another machine.
        """
        control = control_of(self.directory)
        texts = {name: "none" if value is None else str(value) for name, value in changes.items()}
        return call(control, "set", changes=texts) if changes else call(control, "settings")

    def stop(self, timeout: float = STOP_SECONDS) -> Summary | None:
        """End the run in order, or kill it after ``timeout`` seconds. Returns its summary; None if it wrote none.

        Raises:
            ConfigurationError: an attached run has no such directory, or is on another machine.
            StalledError: a process cannot be ended.
        """
        try:
            end_run(self.directory, timeout)
        except ConfigurationError:  # no run.json, such as before its first life has written it
            if self._process is None:
                raise
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise StalledError(f"process {self._process.pid} of {self.directory} does not end") from None
        return self.summary
