"""What becomes of a benchmark's rows: each to stderr as it comes, all of them as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "runs" / "bench"

Row = dict[str, Any]


def report(name: str, rows: Iterable[Row]) -> None:
    """Run the benchmark, print its table, write ``runs/bench/NAME.json``."""
    started, found = time.perf_counter(), list[Row]()
    for row in rows:
        found.append(row)
        print(f"{name}: {json.dumps(row, ensure_ascii=False)}", file=sys.stderr, flush=True)
    columns = list(dict.fromkeys(column for row in found for column in row))
    table = Table(*(column.replace("_", "\n") for column in columns), box=SIMPLE_HEAD, title=name, title_justify="left")
    for row in found:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    content = {
        "benchmark": name,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "load_average": os.getloadavg()[0],  # above the processes of the benchmark: somebody else was busy
        "seconds": round(time.perf_counter() - started, 1),
        "rows": found,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
