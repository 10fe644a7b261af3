"""A run as one HTML file that opens without a server: the page, with a bounded part of the data in it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

from miles_async.errors import DataError
from miles_async.runtime.files.whole_file import write_whole
from miles_async.samples.columns import Kind
from miles_async.types import JsonObject
from miles_async.watch.bundle import bundle
from miles_async.watch.run import Run
from miles_async.watch.server import STATIC, encode
from miles_async.watch.views import attempts, engines, flags, logs, metrics, overview, samples

POINTS = 400  # of a curve
SAMPLE_STEPS = 6  # of each kind, evenly over the run
SAMPLES = 24  # of a step in full, evenly over its list; the others are in the table only
STORIES = 60
LOG_LINES = 300
MOST_BYTES = 12 << 20  # of the data; beyond it, details are left out
NOTE = "A report: a part of the run, as it stood when this file was written. All of it: miles-async watch RUN_DIR"

T = TypeVar("T")


def report(runs: Sequence[Run]) -> str:
    """The HTML text."""
    answers: dict[str, object] = {}
    left = MOST_BYTES
    for path, answer in _answers(runs):
        size = len(encode(answer))
        if size <= left:
            answers[path] = answer
            left -= size
    series = [metrics.series(run, run.metrics.names[: metrics.MOST_NAMES], points=POINTS) for run in runs]
    return _html(encode({"note": NOTE, "answers": answers, "series": series}).decode())


def _answers(runs: Sequence[Run]) -> Iterator[tuple[str, object]]:
    """(request of the page, answer), the most important ones first."""
    numbers = range(len(runs))
    yield _path("runs"), [overview.standing(run) for run in runs]
    for number, run in enumerate(runs):
        yield _path("overview", run=number), overview.overview(run)
    for chosen in [[number] for number in numbers] + ([list(numbers)] if len(runs) > 1 else []):
        wanted = [runs[number] for number in chosen]
        yield _path("metrics", run=chosen), metrics.names(wanted)
        yield _path("flags", run=chosen), {**flags.flags(wanted), "presets": []}
    for number, run in enumerate(runs):
        yield _path("engines", run=number), engines.engines(run)
        yield from _log_answers(run, number)
        yield from _attempt_answers(run, number)
    for number, run in enumerate(runs):
        yield from _sample_answers(run, number)


def _log_answers(run: Run, number: int) -> Iterator[tuple[str, object]]:
    found = logs.logs(run)
    yield _path("logs", run=number), found
    for log in found:
        page = logs.page(run, str(log["name"]))
        yield _path("log", run=number, name=log["name"]), {**page, "lines": page["lines"][-LOG_LINES:], "start": 0}


def _attempt_answers(run: Run, number: int) -> Iterator[tuple[str, object]]:
    newest = {**attempts.attempts(run), "more": False}
    yield _path("attempts", run=number), newest
    for end in attempts.ENDS:
        yield _path("attempts", run=number, end=end), {**attempts.attempts(run, end=end), "more": False}
    subjects = [row["attempt"] for row in newest["rows"][:STORIES]]
    subjects += [letter["prompt_id"] for letter in newest["quarantined"]]
    for subject in subjects:
        yield _path("story", run=number, subject=subject), attempts.story(run, str(subject))


def _sample_answers(run: Run, number: int) -> Iterator[tuple[str, object]]:
    kinds: tuple[Kind, ...] = ("train", "eval")
    steps = samples.samples(run, "train", None)["steps"]
    kept = {kind: _evenly(steps[kind], SAMPLE_STEPS) for kind in kinds}
    yield _path("samples", run=number, kind="train"), {**samples.samples(run, "train", None), "steps": kept}
    for kind in kinds:
        for step in reversed(kept[kind]):
            found = {**samples.samples(run, kind, step), "steps": kept}
            yield _path("samples", run=number, kind=kind, step=step), found
            if kind == "eval" and step == kept[kind][-1]:
                yield _path("samples", run=number, kind=kind), found
    for kind in kinds:
        for step in reversed(kept[kind]):
            rows = samples.samples(run, kind, step)["rows"]
            for row in _evenly([row for row in rows if row["branch"] == 0], SAMPLES):
                yield from _one_sample(run, number, kind, step, row)


def _one_sample(run: Run, number: int, kind: Kind, step: int, row: JsonObject) -> Iterator[tuple[str, object]]:
    attempt, place = row["attempt_id"], row["sample"]
    with suppress(DataError):  # it was removed meanwhile
        found = samples.sample(run, kind, step, attempt, place)
        yield _path("sample", run=number, kind=kind, step=step, attempt=attempt, sample=place), found
    if kind == "train":
        yield _path("story", run=number, subject=attempt), attempts.story(run, str(attempt))


def _evenly(items: Sequence[T], count: int) -> list[T]:
    if len(items) <= count:
        return [*items]
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def _path(name: str, /, **parameters: object) -> str:
    """As ``address`` in source.js makes it."""
    return f"{name}?{urlencode(parameters, doseq=True, safe='*').replace('~', '%7E')}" if parameters else name


def _html(data: str) -> str:
    script = bundle(STATIC, "main.js")
    styles = "\n".join(
        (STATIC / name).read_text(encoding="utf-8") for name in ("vendor/uplot/uPlot.min.css", "app.css")
    )
    licence = (STATIC / "vendor/uplot/LICENSE").read_text(encoding="utf-8").replace("--", "- -")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(styles)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>miles_async</title>\n'
        '<link rel="icon" href="data:,">\n'
        f"<!-- with uPlot:\n{licence}-->\n<style>{styles}</style>\n</head>\n<body>\n"
        f'<div id="app"></div>\n<script type="application/json" id="report-data">{_inert(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _inert(data: str) -> str:
    """JSON that ends no script element and begins no comment, whatever texts it holds."""
    return (
        data.replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write_report(runs: Sequence[Run], path: Path) -> int:
    """Write the report and return its bytes. Raises OSError; the file is whole or absent then."""
    write_whole(path, report(runs).encode())
    return path.stat().st_size
