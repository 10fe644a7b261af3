"""``miles-async timeline``: a run as a file for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_async.commands.parser import CommandParser, at_least_one
from miles_async.errors import ConfigurationError
from miles_async.watch.run import open_runs
from miles_async.watch.timeline.build import FILE_NAME, MOST_ATTEMPTS, Part, write_timeline

VIEWER = "https://ui.perfetto.dev"


def timeline(words: Sequence[str]) -> str:
    """Write the timeline and return what to say.

    Raises:
        ConfigurationError: there is no run, or the file cannot be written.
        LedgerError: the ledger cannot be read to its end.
    """
    parser = CommandParser(
        prog="miles-async timeline",
        description="Write a timeline of a run, during it or afterwards: groups per engine, cuts, steps and their "
        "parts, publications and their phases, checkpoints, evaluations, idle times and outages. Perfetto and "
        "chrome://tracing open it.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {FILE_NAME} in the run directory")
    parser.add_argument(
        "--last-steps", type=at_least_one, metavar="STEPS", help="only the newest steps; default: the whole run"
    )
    parser.add_argument(
        "--attempts",
        type=at_least_one,
        default=MOST_ATTEMPTS,
        help="most attempts, the newest ones; default: %(default)s",
    )
    parsed = parser.parse_args(words)
    runs = open_runs([parsed.directory])
    if len(runs) > 1:
        raise ConfigurationError(f"{parsed.directory}: expected one run directory, found {len(runs)} in it; name one")
    path = parsed.output or runs[0].directory / FILE_NAME
    try:
        size = write_timeline(runs[0], path, Part(attempts=parsed.attempts, last_steps=parsed.last_steps))
    except OSError as error:
        raise ConfigurationError(f"--output {path}: {error}") from error
    return f"wrote {path} ({size / 1e6:.1f} MB); open it in {VIEWER}, which sends it nowhere\n"
