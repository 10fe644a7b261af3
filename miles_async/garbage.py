"""When Python looks for cycles of garbage.

By default whenever 700 objects more are alive. An event loop with a thousand requests in flight holds 100,000 objects
that only wait, and the rollout process 400,000 that were imported: looking through all of them stops the loop for a
tenth of a second, every few seconds (``tests/benchmarks/loop_lag.py``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (10_000, 10, 10)


def settle() -> None:
    """To be called when a process has started up: what it holds by now is never looked at again, the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, Python looks rarely."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
