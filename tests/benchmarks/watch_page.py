"""How quick the page of a large run is: 10,000 steps of 130 metrics and 1 M samples on disk, in Chromium."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from miles_async.samples.columns import FileNote
from miles_async.samples.files import file_of
from tests.benchmarks.report import Row
from tests.integration.watch_browser import Page, browser, served
from tests.unit.samples.sample_rows import row, write_file
from tests.unit.watch.run_files import write_finished_run

STEPS, SAMPLES_PER_STEP = 10_000, 100
METRICS = 130  # as many as the quick start has
VIEWS = (
    "metrics?run=0",
    "samples?run=0",
    f"samples?run=0&kind=train&step={STEPS // 2}",
    "attempts?run=0",
    "engines?run=0",
    "flags?run=0",
    "logs?run=0",
    "overview?run=0",
)
_GO = """
const [hash, view, done] = arguments, main = document.getElementById("main"), began = performance.now();
main.dataset.view = ""; location.hash = hash;
const look = () => main.dataset.view === view ? done(performance.now() - began) : requestAnimationFrame(look);
look();
"""
_PAINTED = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def rows() -> Iterator[Row]:
    """First paint, then every view twice; the last row has the memory of the server."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = write_finished_run(Path(folder) / "run", steps=STEPS)
        _metrics(run_dir)
        _samples(run_dir)
        before = _mebibytes()
        with served([run_dir]) as base, browser(Path(folder) / "profile") as page:
            for time in ("first", "again"):
                page.open(base)
                yield {"what": f"first paint, {time}", "ms": round(page.driver.execute_script(_PAINTED))}
            first, again = ([_change(page, view) for view in VIEWS] for _ in range(2))
            for view, ms, again_ms in zip(VIEWS, first, again, strict=True):
                yield {"what": view, "ms": ms, "again_ms": again_ms}
        yield {"what": "memory of the server, MiB", "more": round(_mebibytes() - before)}


def _change(page: Page, view: str) -> int:
    """Milliseconds from a click until the view is drawn."""
    return round(page.driver.execute_async_script(_GO, f"#/{view}", view.partition("?")[0]))


def _metrics(run_dir: Path) -> None:
    file = MetricsFile(run_dir / FILE_NAME)
    for step in range(1, STEPS + 1):
        file.log({f"train/metric_{number}": step / (number + 1) for number in range(METRICS)}, step=step)
    file.finish()


def _samples(run_dir: Path) -> None:
    """One file is written, and copied for every step."""
    directory = run_dir / "samples"
    samples = [row(step=1, attempt_id=number // 8, sample=number % 8, samples=8) for number in range(SAMPLES_PER_STEP)]
    note = FileNote(kind="train", step=1, groups=SAMPLES_PER_STEP // 8, groups_written=SAMPLES_PER_STEP // 8)
    write_file(file_of(directory, "train", 1), note, samples)
    for step in range(2, STEPS + 1):
        shutil.copy(file_of(directory, "train", 1), file_of(directory, "train", step))


def _mebibytes() -> float:
    return psutil.Process().memory_info().rss / 2**20
