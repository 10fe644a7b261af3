"""Checks, on a node of a cluster, of the directories that it needs, local and shared ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.errors import ConfigurationError
from miles_async.runtime.files.owned_directory import OwnedDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFiles:
    """Directories that processes of one kind need. Paths are absolute, keys are the flags that name them."""

    present: Mapping[str, Path] = field(default_factory=dict)  # directories; copies do
    shared: Mapping[str, Path] = field(default_factory=dict)  # marks of :func:`marked`
    otherwise: str = ""  # what to do if there is no shared file system

    def check(self) -> None:
        """Raise ConfigurationError for what this node lacks."""
        for flag, path in self.present.items():
            if not path.is_dir():
                raise ConfigurationError(
                    f"{flag} {path}: expected this directory on every node, and {socket.gethostname()} has none: copy "
                    "it there, or name one on a shared file system"
                )
        for flag, mark in self.shared.items():
            if not mark.exists():
                raise ConfigurationError(
                    f"{flag}: expected a directory that all nodes share, and {socket.gethostname()} does not see what "
                    f"the run's machine writes in {mark.parent}: choose one on a shared file system, or "
                    f"{self.otherwise}"
                )


@contextmanager
def marked(directories: Mapping[str, Path]) -> Iterator[Mapping[str, Path]]:
    """Leave a mark by which other nodes tell that they share a directory; flag → mark. Removed at the end.

    A directory that is not there yet is marked in its nearest parent that is. Raises ConfigurationError.
    """
    marks: dict[str, OwnedDirectory] = {}
    try:
        for flag, directory in directories.items():
            nearest = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
            try:
                marks[flag] = OwnedDirectory(nearest)
            except OSError as error:
                raise ConfigurationError(f"{flag} {directory}: {error}") from error
        yield {flag: mark.path for flag, mark in marks.items()}
    finally:
        for mark in marks.values():
            mark.remove()
