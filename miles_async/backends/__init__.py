"""Training backends: implementations of ``api.TrainBackend``, in the entry point group ``miles_async.backends``."""

from __future__ import annotations

import importlib.metadata

from miles_async.api import TrainBackend
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError

ENTRY_POINTS = "miles_async.backends"


def find_backend(name: str) -> importlib.metadata.EntryPoint:
    """Where the backend is that ``--train-backend`` names. Raises ConfigurationError for an unknown name."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise ConfigurationError(
            f"--train-backend {name}: expected one of {sorted(found)} (entry points {ENTRY_POINTS})"
            + did_you_mean(name, found)
        )
    return found[name]


def create_backend(name: str, **options: object) -> TrainBackend:
    """Create the backend that ``--train-backend`` names. Raises ConfigurationError for an unknown name."""
    backend: TrainBackend = find_backend(name).load()(**options)
    return backend
