"""Writes the state and load of all engines to a file, for the page of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

from miles_async.engines.load import Loads
from miles_async.runtime.files.whole_file import write_whole
from miles_async.types import EngineLoad, EngineReport, EnginesReport

log = structlog.get_logger(__name__)

REPORT_SECONDS = 10.0


class EngineReports:
    """Polls the engines of some registries with small requests."""

    def __init__(self, loads: Sequence[tuple[Loads, str]], path: Path) -> None:
        """``loads``: with the role of their engines."""
        self._loads = loads
        self._path = path
        self._latest: dict[str, EngineLoad] = {}
        self._failed = False

    async def run(self) -> NoReturn:
        """Write until cancelled, and once more then. Failures to write cause a single warning."""
        try:
            while True:
                for each, _ in self._loads:
                    self._latest.update(await each.loads())
                await asyncio.to_thread(self._write, self._report())
                await asyncio.sleep(REPORT_SECONDS)
        finally:
            self._write(self._report())

    def _write(self, report: EnginesReport) -> None:
        try:
            write_whole(self._path, msgspec.json.encode(report))
        except OSError as error:
            if not self._failed:
                log.warning("the state of engines cannot be written; later failures are silent", error=str(error))
            self._failed = True

    def _report(self) -> EnginesReport:
        records = [(record, role) for each, role in self._loads for record in each.registry.engines.values()]
        return EnginesReport(
            time=time.time(),
            engines={
                record.engine_id: EngineReport(
                    state=record.state.value,
                    load=self._latest.get(record.engine_id),
                    pauses=tuple(record.pauses),
                    role=role,
                )
                for record, role in records
            },
        )
