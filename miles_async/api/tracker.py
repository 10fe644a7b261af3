"""Protocol of trackers, which receive metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """``--custom-tracker-path module:attr``: a class made without arguments that is given all metrics.

    It is called in a separate thread, one step after another; its errors are logged and don't affect the run.

    >>> class PrintRewards:
    ...     def log(self, metrics, *, step):
    ...         if "reward/mean" in metrics:
    ...             print(f"step {step}: reward {metrics['reward/mean']:.2f}")
    ...
    ...     def finish(self):
    ...         print("done")
    >>> tracker = PrintRewards()
    >>> tracker.log({"reward/mean": 0.5, "lr": 1e-6}, step=3)
    step 3: reward 0.50
    >>> tracker.finish()
    done
    """

    def log(self, metrics: Metrics, *, step: int) -> None: ...

    def finish(self) -> None: ...
