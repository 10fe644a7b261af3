"""``miles-async scale``: change the number of engines during a run; without a number, list them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_async.commands.parser import CommandParser
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.control import call
from miles_async.runtime.processes.run_process import control_of


def scale(words: Sequence[str]) -> str:
    """Return the output of ``miles-async scale``.

    Raises:
        ConfigurationError: no such run or group, or the run is over, on another machine, or starting.
    """
    parser = CommandParser(
        prog="miles-async scale",
        description="Change the number of engines in a group of a running run. New engines get the current "
        "weights; engines to be removed finish their requests first. Without GROUP: list groups and engines.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("group", nargs="?", metavar="GROUP", help="group of --server-groups (`engine` without one)")
    parser.add_argument("engines", nargs="?", type=int, metavar="N", help="new number of engines")
    parsed = parser.parse_args(words)
    if (parsed.group is None) != (parsed.engines is None):
        raise ConfigurationError(f"expected GROUP and N, or neither; see {parser.prog} --help")
    path = control_of(parsed.directory)
    if parsed.group is None:
        return call(path, "engines") + "\n"
    return call(path, "scale", group=parsed.group, engines=parsed.engines) + "\n"
