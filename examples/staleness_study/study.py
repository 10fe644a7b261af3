"""Runs the staleness study and writes docs/staleness_study.md. From the repository root:

    python -m examples.staleness_study.study [--seeds N] [--jobs N] [--runs DIR] [--docs DIR] [--report-only]

Results are kept in ``DOCS/staleness_study.json``. Cells that are in it with the flags that they have now are not run
again, so the study can be interrupted at any time and goes on where it was. A cell whose run fails three times is left
out; the exit code is 1 if any cell is missing at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.quickstart.prepare import ASSETS, prepare
from examples.quickstart.tasks import SORT
from examples.staleness_study.cells import SEEDS, Cell, study_cells
from examples.staleness_study.report import ACCURACY, PAGE_NAME, table, write_report
from examples.staleness_study.results import CellResult, Results
from examples.staleness_study.run_cell import CellFailedError, console_log, run_cell

DATA_NAME = "staleness_study.json"
ATTEMPTS = 3  # per cell: on a machine that is busy with other things, Ray does not always come up


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The cells that are still to be run, where they run, and where their results go."""

    cells: tuple[Cell, ...]
    runs: Path
    results: Results

    async def run(self, jobs: int) -> None:
        """Run all cells, ``jobs`` at a time. A cell that keeps failing is left out."""
        numbered = iter(enumerate(self.cells, start=1))
        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(self._work(numbered))

    async def _work(self, numbered: Iterator[tuple[int, Cell]]) -> None:
        for number, cell in numbered:
            run_dir = self.runs / cell.name
            place = f"[{number}/{len(self.cells)}] {cell.name}"
            print(f"{place}: running, log in {console_log(run_dir)} ...", flush=True)
            started = time.monotonic()
            result = await self._result(cell, run_dir, place)
            if result is not None:
                self.results.add(result)
                print(f"{place}: {time.monotonic() - started:.0f} s, {_learned(result)}", flush=True)

    async def _result(self, cell: Cell, run_dir: Path, place: str) -> CellResult | None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await run_cell(cell, run_dir)
            except CellFailedError as error:
                print(f"{place}: attempt {attempt} of {ATTEMPTS} FAILED, {error}", flush=True)
        return None


def _learned(result: CellResult) -> str:
    return f"accuracy {result.greedy:.2f}, sampled {result.sampled:.2f}, effective share {result.last_ess:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Staleness study on the sort task.", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs per cell")
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at the same time")
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="run directories of the cells")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the data, the page and the figure are")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what is in the data")
    options = parser.parse_args(arguments)
    results, cells = Results(options.docs / DATA_NAME), tuple(study_cells(options.seeds))
    if not options.report_only:
        prepare(SORT, ASSETS / SORT.name)
        done = {result.cell for result in results.current(cells)}
        missing = tuple(cell for cell in cells if cell not in done)
        print(f"{len(done)} of {len(cells)} cells are finished", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            asyncio.run(Study(cells=missing, runs=options.runs, results=results).run(options.jobs))
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", flush=True)
    found = results.current(cells)
    if not found:
        print("no cell is finished: nothing to report", file=sys.stderr)
        return 1
    write_report(found, options.seeds, options.docs)
    print(table(found, ACCURACY, options.seeds), f"written to {options.docs / PAGE_NAME}", sep="\n")
    return 0 if len(found) == len(cells) else 1


if __name__ == "__main__":
    sys.exit(main())
