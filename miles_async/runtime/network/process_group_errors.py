"""Error handling of the process groups that carry weights, for both ends.

By default (torch 2.13, ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` 3) a watchdog thread ends the process when an operation of
one of its NCCL groups fails or takes too long. That is right for training: a rank that lost another must not step on.
It is wrong for weights: an engine that dies would take a trainer rank and the other engines along.

ProcessGroupNCCL reads these variables when a group is made, so what is set meanwhile holds for that group alone. With
``TORCH_NCCL_BLOCKING_WAIT`` it has no watchdog: whoever waits for an operation waits until it is done on the device,
and gets its failure, or that it took too long, as an exception, with the communicator aborted. gloo's groups are like
that anyway.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@contextmanager
def errors_are_raised() -> Iterator[None]:
    """Apply to process groups created inside the context, even by several threads; other groups keep their handling."""
    _environment.enter()
    try:
        yield
    finally:
        _environment.leave()


class _Environment:
    """Environment variable that is set while any thread is inside the context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = os.environ.get(BLOCKING_WAIT)
                os.environ[BLOCKING_WAIT] = "1"
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            if self._before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = self._before


_environment = _Environment()
