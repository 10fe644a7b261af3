"""Garbage-collector tuning.

By default Python collects whenever 700 more objects are alive than after the last collection, and traverses every
object made since. With a thousand requests in flight that is 100,000 objects, which stops the event loop for 30 to
70 ms several times per training step, and for 0.2 s with the 400,000 that the rollout process imported
(``tests/benchmarks/loop_lag.py``). It finds next to nothing, since our tasks leave no cycles. With high thresholds a
collection never runs in a steady state, and still runs soon enough after a leak of cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 10, 10)


def settle() -> None:
    """Exempt all live objects from collection, and collect rarely. Call once a process has started up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely inside the context."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
