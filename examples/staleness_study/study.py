"""Runs the staleness study and writes docs/staleness_study.md. From the repository root:

    python -m examples.staleness_study.study [--seeds N] [--runs DIR] [--docs DIR] [--report-only]

Cells run one after the other, each in ``DIR/<cell>``; finished ones are not run again, so an interrupted
study goes on where it was. The exit code is 1 if a cell failed; whether the expected ordering came out is
only printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from examples.quickstart.prepare import ASSETS, prepare
from examples.quickstart.tasks import SORT
from examples.staleness_study.cells import Cell, CellResult, console_log, read_result, run_cell, study_cells
from examples.staleness_study.report import table, verdict, write_report

TAIL_LINES = 15


def finish_cell(cell: Cell, run_dir: Path, position: str) -> CellResult | None:
    """The cell's result, running it if there is none yet; None if it failed."""
    result = read_result(cell, run_dir)
    if result is not None:
        print(f"{position} {cell.name}: done before, {_learned(result)}", flush=True)
        return result
    print(f"{position} {cell.name}: running, log in {console_log(run_dir)} ...", flush=True)
    started = time.monotonic()
    code = run_cell(cell, run_dir)
    result = read_result(cell, run_dir) if code == 0 else None
    if result is None:
        tail = console_log(run_dir).read_text(errors="replace").splitlines()[-TAIL_LINES:]
        print(
            f"{position} {cell.name}: FAILED with exit code {code}. Its last lines:",
            *tail,
            sep="\n    ",
            flush=True,
        )
        return None
    print(f"{position} {cell.name}: {time.monotonic() - started:.0f} s, {_learned(result)}", flush=True)
    return result


def _learned(result: CellResult) -> str:
    return f"reward {result.last_reward:.2f}, greedy {result.greedy:.2f}, samples by age {result.age_histogram}"


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Staleness study on the sort task.", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=1, help="runs per cell")
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="run directories of the cells")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the page and the figure go")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what is finished")
    options = parser.parse_args(arguments)
    cells = list(study_cells(options.seeds))
    if options.report_only:
        found = [read_result(cell, options.runs / cell.name) for cell in cells]
    else:
        prepare(SORT, ASSETS / SORT.name)
        found = [
            finish_cell(cell, options.runs / cell.name, f"[{number}/{len(cells)}]")
            for number, cell in enumerate(cells, start=1)
        ]
    results = [result for result in found if result is not None]
    if not results:
        print("no cell is finished: nothing to report", file=sys.stderr)
        return 1
    write_report(results, options.docs)
    print(table(results), *verdict(results), f"written to {options.docs}/staleness_study.md", sep="\n")
    return 0 if len(results) == len(cells) else 1


if __name__ == "__main__":
    sys.exit(main())
