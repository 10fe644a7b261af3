"""The order of prompts: streams of rows, epoch after epoch, and their mixture by weight.

A stream's position is two integers, and the order of an epoch a function of the epoch: so a resumed run continues with
the row that would have come next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from miles_async.errors import CheckpointError
from miles_async.types import Int64, JsonObject

Order = Callable[[int], Int64]
"""Epoch → indices of its rows, in order; the same whenever it is called."""


def uniform(rows: range, seed: Sequence[int], *, shuffled: bool) -> Order:
    """Each row once in an epoch, in an order of the epoch's own, or in that of the files."""

    def order(epoch: int) -> Int64:
        if not shuffled:
            return np.arange(rows.start, rows.stop)
        return rows.start + np.random.default_rng([seed[0], epoch, *seed[1:]]).permutation(len(rows))

    return order


class Stream:
    """An endless stream of rows."""

    def __init__(self, order: Order) -> None:
        self._order_of = order
        self._order: Int64 = np.arange(0)
        self.given = 0  # usable rows, since the beginning
        self._begin(0)

    def next(self) -> tuple[int, int]:
        """The next row, as (epoch, index). Raises LookupError when a whole epoch held no usable one."""
        while self.position == len(self._order):
            if self._began_at == 0 and self._usable == 0 and len(self._order):
                raise LookupError
            self._begin(self.epoch + 1)
        index = int(self._order[self.position])
        self.position += 1
        return self.epoch, index

    def used(self) -> None:
        """The last row was usable."""
        self._usable += 1
        self.given += 1

    @property
    def rows(self) -> Int64:
        """Rows of this epoch, in order."""
        return self._order

    def state(self) -> JsonObject:
        """The position."""
        return {"epoch": self.epoch, "position": self.position, "given": self.given}

    def restore(self, state: JsonObject, name: str) -> None:
        """Continue where :meth:`state` was taken. Raises CheckpointError, which begins with ``name``."""
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch >= 0:
            self._begin(epoch)
        if epoch < 0 or not 0 <= position <= len(self._order):
            raise CheckpointError(f"{name}: cursor out of range: epoch {epoch}, position {position}")
        self.position = self._began_at = position
        self.given = int(state.get("given", 0))

    def skip_to(self, epoch: int) -> None:
        """Continue with the first row of ``epoch``."""
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.position = self._began_at = 0  # rows of this epoch that were read; where this object began the epoch
        self._usable = 0  # found since the epoch began, or since the position was restored
        self._order = self._order_of(epoch)


def next_stream(given: Sequence[int], weights: Sequence[float]) -> int:
    """Which stream gives the next prompt, so that after any number n stream i has given n × weight, to within one.

    The prompt that is due first among those that may come already, as in proportionate fair scheduling (Baruah et al.
    1996): the j-th of a stream (from 0) of weight w may come at place floor(j / w) and is due before ceil((j + 1) / w).

    >>> given = [0, 0]
    >>> for _ in range(8):
    ...     given[next_stream(given, [3, 1])] += 1
    >>> given
    [6, 2]
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total, place = sum(exact, Fraction(0)), sum(given)
    due: list[tuple[int, int]] = []
    for index, (count, weight) in enumerate(zip(given, exact, strict=True)):
        share = weight / total
        if count // share <= place:
            due.append((-(-(count + 1) // share), index))
    return min(due)[1]
