"""``miles-async stop``: end a run in order if possible, and clean up after it either way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from miles_async.commands.parser import CommandParser
from miles_async.runs.ending import STOP_SECONDS, end_run


def stop(words: Sequence[str], show: Callable[[str], None]) -> int:
    """Run ``miles-async stop``; return the exit code. Raises what ``runs.ending.end_run`` does.

    ``show`` prints, and raises nothing if its reader is gone: ``end_run`` speaks before it acts.
    """
    parser = CommandParser(
        prog="miles-async stop",
        description="End a run as Ctrl-C would, in order and with its summary; then clean up what is left.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument(
        "--timeout",
        type=float,
        default=STOP_SECONDS,
        metavar="SECONDS",
        help="seconds to wait for an orderly shutdown before killing processes (default: %(default)g)",
    )
    parsed = parser.parse_args(words)
    end_run(parsed.directory, parsed.timeout, lambda line: show(f"{line}\n"))
    return 0
