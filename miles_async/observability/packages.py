"""Packages of trackers that are extras of the project: which of those that a run needs are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from miles_async.arguments.observability import ObservabilityArguments

EXTRAS: Mapping[str, str] = {
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_trackio": "trackio",
    "use_swanlab": "swanlab",
}
"""Field of ObservabilityArguments → the extra that it needs, which has the name of its module."""


def missing_packages(arguments: ObservabilityArguments) -> Iterator[str]:
    """Yield a line for each tracker whose package is not installed, with the command that installs it."""
    for field, extra in EXTRAS.items():
        if getattr(arguments, field) and find_spec(extra) is None:
            yield (
                f"--{field.replace('_', '-')}: expected the package {extra}, which is not installed: "
                f"pip install 'miles-async[{extra}]'"
            )
