"""``miles-async set``: change settings of a live run at the boundary of a step; without NAME=VALUE, list them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from miles_async.arguments.live import IN_FORCE, REQUESTS, as_typed
from miles_async.commands.parser import CommandParser
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.control import call
from miles_async.runtime.processes.run_process import control_of


def set_live(words: Sequence[str]) -> str:
    """Return the output of ``miles-async set``.

    Raises:
        ConfigurationError: no such run, it is over, on another machine, another user's or starting, or it refuses a
            change.
    """
    parser = CommandParser(
        prog="miles-async set",
        description="Change settings of a live run, all of them or none. They are checked as flags are at the start, "
        "take effect after a rollout step, and are in the ledger, in checkpoints and in the schedule of --record. "
        "Without NAME=VALUE: list the settings.",
        epilog=_names(),
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE", help="see below")
    parsed = parser.parse_args(words)
    changes = _parsed(parsed.changes)
    control = control_of(parsed.directory)
    return (call(control, "set", changes=changes) if changes else call(control, "settings")) + "\n"


def _parsed(words: Sequence[str]) -> dict[str, str]:
    """Raises ConfigurationError: a word is no NAME=VALUE, or a name comes twice."""
    if bad := [word for word in words if "=" not in word]:
        raise ConfigurationError(f"expected NAME=VALUE, found {', '.join(bad)}")
    pairs = [word.partition("=")[::2] for word in words]
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ConfigurationError(f"expected one value of {', '.join(twice)}, found several")
    return dict(pairs)


def _names() -> str:
    flags = ", ".join(map(as_typed, IN_FORCE))
    requests = ", ".join(f"{name}={'|'.join(words)}" for name, words in REQUESTS.items())
    return f"Names: {flags} (as the flags of `miles-async train`); {requests}."
