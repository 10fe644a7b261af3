"""Error handling of the process groups that carry weights, for both ends.

By default (torch 2.13, ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` 3) a watchdog thread ends the process when an operation of
one of its NCCL groups fails or takes too long. That is right for training: a rank that lost another must not continue.
It is wrong for weights: an engine that dies would take a trainer rank and the other engines along.

ProcessGroupNCCL reads these variables when a group is made, so values set meanwhile hold for that group alone. With
``TORCH_NCCL_BLOCKING_WAIT`` it has no watchdog: waiting for an operation lasts until it is done on the device, and
raises its failure or timeout, with the communicator aborted. gloo's groups always do so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


_lock = threading.Lock()
_inside: list[str | None] = []  # per thread inside the context: the variable before it


@contextmanager
def errors_are_raised() -> Iterator[None]:
    """Apply to process groups created inside the context, even by several threads; other groups keep their handling."""
    with _lock:
        _inside.append(_inside[0] if _inside else os.environ.get(BLOCKING_WAIT))
        os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                del os.environ[BLOCKING_WAIT]
                os.environ.update({} if before is None else {BLOCKING_WAIT: before})
