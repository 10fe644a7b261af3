"""The order of prompts: streams of rows, epoch after epoch, and their mixture by weight.

A stream's position is two integers, and the order of an epoch a function of the epoch and of what was known when it
began: so a resumed run continues with the row that would have come next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from miles_async.errors import CheckpointError
from miles_async.types import Int64, JsonObject


class Order(Protocol):
    """The rows of each epoch."""

    patience: int  # epochs without a usable row after which there is none

    def begin(self, epoch: int) -> Int64:
        """Indices of the rows that an epoch gives, in order."""
        ...

    def state(self) -> JsonObject:
        """What the current epoch's order depends on, besides its number."""
        ...

    def restore(self, epoch: int, state: JsonObject) -> Int64:
        """The order of the epoch in which :meth:`state` was taken. Raises CheckpointError."""
        ...


class UniformOrder:
    """Each row once in an epoch, in an order of the epoch's own, or in that of the files."""

    patience = 1

    def __init__(self, rows: range, seed: Sequence[int], *, shuffled: bool) -> None:
        """``seed``: first ``--rollout-seed``."""
        self._rows = rows
        self._seed = seed
        self._shuffled = shuffled

    def begin(self, epoch: int) -> Int64:
        """See :class:`Order`."""
        if not self._shuffled:
            return np.arange(self._rows.start, self._rows.stop)
        return self._rows.start + self.random(epoch).permutation(len(self._rows))

    def random(self, epoch: int) -> np.random.Generator:
        """The generator of an epoch."""
        return np.random.default_rng([self._seed[0], epoch, *self._seed[1:]])

    def state(self) -> JsonObject:
        """See :class:`Order`."""
        return {}

    def restore(self, epoch: int, state: JsonObject) -> Int64:
        """See :class:`Order`."""
        return self.begin(epoch)


class Stream:
    """An endless stream of rows."""

    def __init__(self, order: Order, began: Callable[[int, int], None] = lambda epoch, rows: None) -> None:
        """``began``: called with the number of an epoch that begins, and of its rows."""
        self._orders = order
        self._began = began
        self.given = 0  # usable rows, since the beginning
        self._barren = 0  # epochs in a row without one
        self._order: Int64 | None = None  # of this epoch, which begins when its first row is asked for
        self.skip_to(0)

    @property
    def rows(self) -> Int64:
        """Rows of this epoch, in order."""
        if self._order is None:
            self._order = self._orders.begin(self.epoch)
            self._began(self.epoch, len(self._order))
        return self._order

    def next(self) -> tuple[int, int]:
        """The next row, as (epoch, index). Raises LookupError when whole epochs held no usable one."""
        while self.position == len(self.rows):
            if self._began_at == 0:  # else the rows before it may have been usable
                self._barren = 0 if self._usable else self._barren + 1
            if self._barren == self._orders.patience:
                raise LookupError
            self.skip_to(self.epoch + 1)
        index = int(self.rows[self.position])
        self.position += 1
        return self.epoch, index

    def used(self) -> None:
        """The last row was usable."""
        self._usable += 1
        self.given += 1

    def state(self) -> JsonObject:
        """The position, and what the order of its epoch depends on."""
        position = {"epoch": self.epoch, "position": self.position, "given": self.given}
        return position if self._order is None else {**position, **self._orders.state()}

    def restore(self, state: JsonObject, name: str) -> None:
        """Continue where :meth:`state` was taken. Raises CheckpointError, which begins with ``name``."""
        epoch, position = int(state["epoch"]), int(state["position"])
        self.skip_to(max(epoch, 0))
        if position:
            self._order = self._orders.restore(self.epoch, state)
        if epoch < 0 or not 0 <= position <= len(self.rows if position > 0 else ()):
            raise CheckpointError(f"{name}: cursor out of range: epoch {epoch}, position {position}")
        self.position = self._began_at = position
        self.given = int(state.get("given", 0))

    def skip_to(self, epoch: int) -> None:
        """Continue with the first row of ``epoch``."""
        self.epoch, self._order = epoch, None
        self.position = self._began_at = 0  # rows of this epoch that were read; where this object began it
        self._usable = 0  # found since then


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
