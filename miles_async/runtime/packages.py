"""Checks of packages that are extras of this one."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec

from miles_async.errors import ConfigurationError


def require(extra: str, flag: str, *, major: str | None = None) -> None:
    """Check that the package of an extra is installed; both have the same name, as has its module, with underscores.

    ``major``: the beginning that its version must have, such as ``1.``. Raises ConfigurationError with what to install.
    """
    install = f"pip install 'miles-async[{extra}]'"
    if find_spec(extra.replace("-", "_")) is None:
        raise ConfigurationError(f"{flag}: the package {extra} is not installed: {install}")
    if major is not None and not (found := importlib.metadata.version(extra)).startswith(major):
        raise ConfigurationError(f"{flag}: expected {extra} {major}x, found {found}: {install}")
