"""Whether a tracker that has a server uses it: the mode of W&B and SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

from miles_async.errors import ConfigurationError

Mode = Literal["online", "offline", "disabled"]


def mode_of(given: Mode | None, variable: str, environment: Mapping[str, str], aliases: Mapping[str, Mode]) -> Mode:
    """Return the mode of the flag, else of the environment variable, else online. Raises ConfigurationError.

    ``aliases``: other names that the variable may have.
    """
    if given is not None:
        return given
    named = environment.get(variable) or "online"
    mode = aliases.get(named, named)
    if mode not in get_args(Mode):
        raise ConfigurationError(f"{variable}={named}: expected one of {', '.join(get_args(Mode))}")
    return cast(Mode, mode)
