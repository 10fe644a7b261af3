"""A run directory opened for reading: of a live run, a finished or killed one, or one copied from elsewhere."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from miles_async.errors import ConfigurationError, LedgerError
from miles_async.ledger.reader import ChangeRecord, LedgerReader, Settled, open_ledger
from miles_async.observability.metrics_file import FILE_NAME
from miles_async.runtime.files.run_directory import CONFIG_FILE, ENGINES_FILE, LEDGER_FILE, RANKS_FILE, check_directory
from miles_async.runtime.json_texts import decoded_object
from miles_async.runtime.processes.run_process import RUN_FILE
from miles_async.staleness.ledger import Balance
from miles_async.types import EnginesReport, JsonObject, RanksReport
from miles_async.watch.metrics_table import MetricsTable

Report = TypeVar("Report")

MARKS = (RUN_FILE, FILE_NAME, LEDGER_FILE, CONFIG_FILE)
"""Files by which a directory is known as a run's."""


class Run:
    """One run directory and cached contents."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self.metrics = MetricsTable(directory / FILE_NAME)
        self._settled = Settled()
        self._ledger_file: tuple[int, int] | None = None  # device and inode
        self._lock = threading.Lock()

    def file(self, *parts: str) -> Path | None:
        """A regular file in the directory; None if there is none, or if the path or a link leaves the directory."""
        try:
            path = self.directory.joinpath(*parts).resolve()
            inside = path.is_relative_to(self.directory.resolve())
            return path if inside and path.is_file() else None
        except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
            return None

    @contextmanager
    def ledger(self) -> Iterator[LedgerReader | None]:
        """The run's ledger; None if it has none. Raises LedgerError: there is one that cannot be read."""
        path = self.file(LEDGER_FILE)
        if path is None:
            yield None
            return
        with open_ledger(path) as reader:
            yield reader

    def balance(self) -> Balance | None:
        """The balance of the ledger; None if there is none. Raises LedgerError as :meth:`ledger` does."""
        with self._lock, self.ledger() as reader:
            if reader is None:
                return None
            status = (self.directory / LEDGER_FILE).stat()
            if (status.st_dev, status.st_ino) != self._ledger_file:
                self._settled, self._ledger_file = Settled(), (status.st_dev, status.st_ino)
            return reader.balance_after(self._settled)

    def read_ahead(self) -> None:
        """Read what takes seconds in a long run, so that the page need not wait for it."""
        self.metrics.refresh()
        with suppress(LedgerError):
            self.balance()

    def summary(self) -> JsonObject:
        """summary.json; empty during the run, or if it cannot be read."""
        path = self.file("summary.json")
        with suppress(OSError):
            return decoded_object(path.read_bytes()) if path else {}
        return {}

    def engines(self) -> EnginesReport | None:
        """engines.json; None if it is absent or cannot be read."""
        return self._report(ENGINES_FILE, EnginesReport)

    def ranks(self) -> RanksReport | None:
        """ranks.json; None if it is absent or cannot be read."""
        return self._report(RANKS_FILE, RanksReport)

    def _report(self, name: str, kind: type[Report]) -> Report | None:
        path = self.file(name)
        with suppress(OSError, UnicodeError, msgspec.MsgspecError, RecursionError):
            return msgspec.json.decode(path.read_bytes(), type=kind) if path else None
        return None

    def flags(self) -> Mapping[str, Mapping[str, object]]:
        """Group → flag without dashes → value as TOML has it; empty if config.toml is absent or unreadable."""
        path = self.file(CONFIG_FILE)
        with suppress(OSError, ValueError, RecursionError):
            tables = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
            return {name: table for name, table in tables.items() if isinstance(table, dict)}
        return {}

    @property
    def total_steps(self) -> int | None:
        """--num-rollout; None if config.toml does not say."""
        value = self.flags().get("rollout", {}).get("num-rollout")
        return value if isinstance(value, int) else None

    def changes(self) -> Sequence[ChangeRecord]:
        """Settings changed and requests made while the run was live, in order; none if no ledger can be read."""
        with suppress(LedgerError), self.ledger() as reader:
            return () if reader is None else reader.changes()
        return ()


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """Open run directories; any other directory stands for the runs in it that can be read, newest first.

    Raises ConfigurationError: a path does not exist, cannot be read, or holds no run.
    """
    directories = list(dict.fromkeys(each for path in paths for each in _runs_at(path)))
    names = [directory.resolve().name for directory in directories]
    return [
        Run(directory, name if names.count(name) == 1 else str(directory))
        for directory, name in zip(directories, names, strict=True)
    ]


def is_run(directory: Path) -> bool:
    """True if a run has written into the directory."""
    return any((directory / mark).is_file() for mark in MARKS)


def _runs_at(path: Path) -> list[Path]:
    check_directory(path)
    found: dict[Path, float] = {}
    try:
        if is_run(path):
            return [path]
        for each in path.iterdir():
            with suppress(OSError):  # another user's, or removed meanwhile
                if each.is_dir() and is_run(each):
                    found[each] = each.stat().st_mtime
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not found:
        raise ConfigurationError(f"{path}: expected a run directory, or a directory of some; found no {MARKS[0]} there")
    return sorted(found, key=found.__getitem__, reverse=True)
