"""``miles-async report``: runs as one HTML file that opens without a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_async.commands.parser import CommandParser
from miles_async.errors import ConfigurationError
from miles_async.watch.run import open_runs

FILE_NAME = "report.html"


def report(words: Sequence[str]) -> str:
    """Write the report and return what to say. Raises ConfigurationError: no run is there, or it cannot be written."""
    from miles_async.watch.report import write_report

    parser = CommandParser(
        prog="miles-async report",
        description="Write the page of `miles-async watch` with a part of the data into one HTML file, to open without "
        "a server, to keep or to send. It holds prompts and answers.",
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="RUN_DIR", help="run directories")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {FILE_NAME} in the first run directory")
    parsed = parser.parse_args(words)
    runs = open_runs(parsed.directories)
    path = parsed.output or runs[0].directory / FILE_NAME
    try:
        size = write_report(runs, path)
    except OSError as error:
        raise ConfigurationError(f"--output {path}: {error}") from error
    return f"wrote {path} ({size / 1e6:.1f} MB)\n"
