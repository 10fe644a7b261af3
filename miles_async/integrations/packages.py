"""Checks of the packages behind the integrations, which are extras of this one."""

from __future__ import annotations

import importlib.metadata

from miles_async.errors import ConfigurationError


def require(package: str, flag: str, *, major: str | None = None) -> None:
    """Check that a package is installed. ``major``: the beginning that its version must have, such as ``1.``.

    Raises ConfigurationError with the extra to install, which is called like the package.
    """
    install = f"pip install 'miles-async[{package}]'"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(f"{flag}: the package {package} is not installed: {install}") from None
    if major is not None and not found.startswith(major):
        raise ConfigurationError(f"{flag}: expected {package} {major}x, found {found}: {install}")
