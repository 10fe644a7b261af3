"""Parts that trackers share: the run, its ids at trackers, its flags as one table, and the mode of trackers with a
server.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.addresses import LOCAL, Network
from miles_async.runtime.processes.restarts import own_restarts

Settings = Mapping[str, object]
"""Flags by group."""

Mode = Literal["online", "offline", "disabled"]
"""Whether a tracker that has a server uses it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run's flags, all its settings and its network, for trackers."""

    arguments: ObservabilityArguments
    settings: Settings = field(default_factory=dict)
    network: Network = LOCAL


def save_run_id(run_dir: Path, tracker: str, run_id: str) -> None:
    """Write the id that a tracker gave the run to ``<tracker>_run_id``, so that a restarted run continues it.

    If the directory cannot be written, a later restart begins another one.
    """
    with suppress(OSError):
        _file(run_dir, tracker).write_text(f"{run_id}\n")


def earlier_run_id(tracker: str) -> str | None:
    """The id from the newest earlier start of this run (``--max-run-restarts``); None if no start had one."""
    for restart in reversed(own_restarts()):
        with suppress(OSError):
            return _file(Path(restart.run_dir), tracker).read_text().strip() or None
    return None


def _file(run_dir: Path, tracker: str) -> Path:
    return run_dir / f"{tracker}_run_id"


def flat_settings(settings: Settings) -> dict[str, str]:
    """Values of flags by their names, as text.

    >>> flat_settings({"optimizer": {"lr": 1e-6}})
    {'lr': '1e-06'}
    """
    groups = [group for group in settings.values() if isinstance(group, Mapping)]
    return {str(name): str(value) for group in groups for name, value in group.items()}


def mode_of(given: Mode | None, variable: str, environment: Mapping[str, str], aliases: Mapping[str, Mode]) -> Mode:
    """Return the mode of the flag, else of the environment variable, else online. Raises ConfigurationError.

    ``aliases``: other values of the variable → the mode they mean.
    """
    if given is not None:
        return given
    named = environment.get(variable) or "online"
    mode = aliases.get(named, named)
    if mode not in get_args(Mode):
        hint = did_you_mean(named, get_args(Mode))
        raise ConfigurationError(f"{variable}={named}: expected one of {', '.join(get_args(Mode))}{hint}")
    return cast(Mode, mode)
