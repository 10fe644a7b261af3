"""When Python looks for cycles of garbage.

By default whenever 700 objects more are alive than were at the last look. What it then looks through is all that was
made since and is still alive: with a thousand requests in flight 100,000 objects that only wait, which stops the event
loop for 30 to 70 ms several times per training step, and 0.2 s with the 400,000 that the rollout process imported
(``tests/benchmarks/loop_lag.py``). It finds next to nothing: our tasks leave no cycles when they end. So it looks when
many more objects are alive than before, which in a steady state is never, and after a leak of cycles is soon enough.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 10, 10)


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
