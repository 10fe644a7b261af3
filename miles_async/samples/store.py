"""The samples directory of a run, within its limit on size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from miles_async.runtime.files.whole_file import write_whole
from miles_async.samples.columns import FileNote, Kind, SampleRow
from miles_async.samples.files import PARTIAL, STATE_FILE, SamplesFile, SamplesState, file_of, files_in
from miles_async.samples.parquet_writer import FileWriter

log = structlog.get_logger(__name__)

SHARE_OF_LIMIT = 8  # one file gets at most this part of the limit, where it is written in parts


class SampleStore:
    """Writes files and keeps their total within the limit: at the limit every second file of the kind with more bytes
    goes, and from then on every second step of that kind is written. Not thread-safe, but for :meth:`drop`.
    """

    def __init__(self, directory: Path, *, limit_bytes: int, only_file: bool) -> None:
        """``only_file``: the first file is the last, and may take the whole limit."""
        self.largest_file = limit_bytes if only_file else limit_bytes // SHARE_OF_LIMIT
        self._directory = directory
        self._every: dict[Kind, int] = {"train": 1, "eval": 1}
        self._order: dict[Kind, dict[int, int]] = {"train": {}, "eval": {}}  # step → how many came before
        self._state = SamplesState(limit_bytes=limit_bytes)
        for file in files_in(directory):
            self._index(file.kind, file.step)
        self._bytes = sum(self._sizes().values())  # more, if files were removed since; counted again at the limit

    def wants(self, kind: Kind, step: int) -> bool:
        """Whether this step's samples are kept."""
        return self._index(kind, step) % self._every[kind] == 0

    def write(self, note: FileNote, rows: Sequence[SampleRow]) -> None:
        """Write a file at once. Raises OSError."""
        file = self.open(note.kind, note.step)
        try:
            file.add(rows)
        except BaseException:
            file.discard()
            raise
        self.complete(file, note)

    def open(self, kind: Kind, step: int) -> FileWriter:
        """Open a file for parts; :meth:`complete` follows. Raises OSError."""
        return FileWriter(file_of(self._directory, kind, step))

    def complete(self, file: FileWriter, note: FileNote) -> None:
        """Give a file its name, and make room if the limit is passed. Raises OSError."""
        try:
            self._bytes += file.close(note)
        except BaseException:
            file.discard()
            raise
        if self._bytes > self._state.limit_bytes:
            while (total := sum((sizes := self._sizes()).values())) > self._state.limit_bytes:
                self._thin_out(sizes)
            self._bytes = total
        self._save(bytes=self._bytes)

    def drop(self) -> bool:
        """Count items dropped because the disk is too slow; True for the first."""
        self._state = msgspec.structs.replace(self._state, dropped=self._state.dropped + 1)
        return self._state.dropped == 1

    def stop(self, why: str) -> None:
        """Note that nothing more is written, if that can be written; raises nothing."""
        try:
            for partial in self._directory.glob(f"*{PARTIAL}"):
                partial.unlink()
            self._save(stopped=why)
        except OSError as error:
            log.info("the state of the samples cannot be written", error=str(error))

    def _index(self, kind: Kind, step: int) -> int:
        order = self._order[kind]
        return order.setdefault(step, len(order))

    def _sizes(self) -> dict[SamplesFile, int]:
        """Bytes of the files that are there: people remove some, perhaps now."""
        sizes = {}
        for file in files_in(self._directory):
            with suppress(FileNotFoundError):
                sizes[file] = file.path.stat().st_size
        return sizes

    def _thin_out(self, sizes: Mapping[SamplesFile, int]) -> None:
        totals = {kind: sum(size for file, size in sizes.items() if file.kind == kind) for kind in self._every}
        kind: Kind = "train" if totals["train"] >= totals["eval"] else "eval"
        self._every[kind] *= 2
        of_kind = [file for file in sizes if file.kind == kind]
        dropped = [file for file in of_kind if self._index(kind, file.step) % self._every[kind]]
        for file in dropped if len(of_kind) > 1 else of_kind:
            file.path.unlink(missing_ok=True)
        log.info("samples reached --save-samples-gib", kind=kind, every=self._every[kind], removed=len(dropped))

    def _save(self, **changes: object) -> None:
        every = {f"{kind}_every": every for kind, every in self._every.items()}
        self._state = msgspec.structs.replace(self._state, **every, **changes)
        write_whole(self._directory / STATE_FILE, msgspec.json.encode(self._state))
