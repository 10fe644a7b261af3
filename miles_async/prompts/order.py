"""The order of prompts: samplers that choose an epoch's rows, streams of rows, and their mixture by weight.

A stream's position is two integers, and the order of an epoch a function of the epoch and of the facts known when it
began (pass rates are frozen then, and saved with the cursor): so a resumed run continues with the row that would have
come next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import index as as_index

import numpy as np

from miles_async.api import EpochRows, PromptSampler
from miles_async.arguments.data import DataArguments
from miles_async.errors import CheckpointError, DataError
from miles_async.runtime.hooks import load_object
from miles_async.runtime.user_code import call_user_code, raised
from miles_async.types import Int64, JsonObject

Rates = Mapping[int, float]
"""Row → share of its last group's samples that solved it."""

Choose = Callable[[int, Rates], Int64]
"""(epoch, pass rates when it began) → indices of its rows, in order."""

BARREN_EPOCHS = 100  # of a user's sampler whose rows are all too long, in a row, before the run ends


class Order:
    """The rows of each epoch, as a sampler chooses them."""

    def __init__(
        self,
        choose: Choose,
        rates: Callable[[], Rates] | None = None,
        *,
        patience: int = 1,
        name: str = "uniform",
    ) -> None:
        """``rates``: those known now; None for a sampler that does not look at them. ``patience``: epochs in a row
        without a usable row before the run ends. ``name``: of the sampler, for messages.
        """
        self.patience = patience
        self._choose = choose
        self._rates = rates
        self._name = name
        self._frozen: Rates = {}
        self._digest = ""

    def begin(self, epoch: int) -> Int64:
        """Indices of the rows that an epoch gives, in order."""
        self._frozen = {} if self._rates is None else dict(self._rates())
        return self._chosen(epoch)

    def state(self) -> JsonObject:
        """Inputs of the current epoch's order, besides its number."""
        return {} if self._rates is None else {"rates": rates_to_json(self._frozen), "order": self._digest}

    def restore(self, epoch: int, state: JsonObject) -> Int64:
        """The order of the epoch in which :meth:`state` was taken. Raises CheckpointError."""
        self._frozen = rates_from_json(state.get("rates", []))
        order = self._chosen(epoch)
        if self._rates is not None and self._digest != state.get("order"):
            raise CheckpointError(
                f"--prompt-sampler {self._name} orders epoch {epoch} differently than before the checkpoint: it has to "
                "depend on its argument alone. Fix it, or add --load-anyway prompt_data to begin the next epoch"
            )
        return order

    def _chosen(self, epoch: int) -> Int64:
        order = self._choose(epoch, self._frozen)
        self._digest = hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest()
        return order


def rates_to_json(rates: Rates) -> list[tuple[int, float]]:
    """Pass rates as pairs."""
    return sorted(rates.items())


def rates_from_json(pairs: Sequence[Sequence[float]]) -> dict[int, float]:
    """The inverse of :func:`rates_to_json`."""
    return {int(row): float(rate) for row, rate in pairs}


def random_of(seed: Sequence[int], epoch: int) -> np.random.Generator:
    """The generator of an epoch. ``seed``: first ``--rollout-seed``."""
    return np.random.default_rng([seed[0], epoch, *seed[1:]])


def uniform(rows: range, seed: Sequence[int], *, shuffled: bool) -> Choose:
    """Each row once per epoch, shuffled by the epoch or in file order."""

    def choose(epoch: int, rates: Rates) -> Int64:
        if not shuffled:
            return np.arange(rows.start, rows.stop)
        return rows.start + random_of(seed, epoch).permutation(len(rows))

    return choose


def difficulty_window(rows: range, all_rows: Choose, arguments: DataArguments, seed: Sequence[int]) -> Choose:
    """Rows outside the window rest: each comes in one of ``--difficulty-rest`` epochs in a row. Others come in each."""
    turns = np.random.default_rng([*seed, len(rows)]).integers(arguments.difficulty_rest, size=len(rows))

    def choose(epoch: int, rates: Rates) -> Int64:
        resting = np.zeros(len(rows), bool)
        for row, rate in rates.items():
            if row in rows:
                resting[row - rows.start] = rate <= arguments.difficulty_low or rate >= arguments.difficulty_high
        order = all_rows(epoch, rates)
        has_turn = ~resting | ((turns + epoch) % arguments.difficulty_rest == 0)
        return order[has_turn[order - rows.start]]

    return choose


def by_user(
    sampler: PromptSampler, rows: range, seed: Sequence[int], metadata: Callable[[int], JsonObject], name: str
) -> Choose:
    """The order that a user's sampler returns. It raises DataError if that is not an order of these rows."""

    def choose(epoch: int, rates: Rates) -> Int64:
        where = f"--prompt-sampler {name}: epoch {epoch}"
        known = {row: rate for row, rate in rates.items() if row in rows}
        random = random_of(seed, epoch)
        given = EpochRows(epoch=epoch, rows=rows, pass_rates=known, random=random, metadata=metadata)
        try:
            order = [as_index(row) for row in call_user_code(sampler, given)]
        except Exception as error:  # supervision point: users' code raises anything
            raise DataError(f"{where}: {raised(error)}") from error
        if not order:
            raise DataError(f"{where}: expected indices of rows, found none")
        if wrong := [row for row in order if row not in rows]:
            raise DataError(f"{where}: expected indices from {rows.start} to {rows.stop - 1}, found {wrong[0]}")
        return np.asarray(order, np.int64)

    return choose


def make_order(
    rows: range,
    arguments: DataArguments,
    seed: Sequence[int],
    rates: Callable[[], Rates],
    metadata: Callable[[int], JsonObject],
) -> Order:
    """The order of ``--prompt-sampler`` over these rows. Raises ConfigurationError for a hook that cannot be used."""
    all_rows, name = uniform(rows, seed, shuffled=arguments.rollout_shuffle), arguments.prompt_sampler
    if name == "uniform":
        return Order(all_rows)
    if name == "difficulty":
        choose, patience = difficulty_window(rows, all_rows, arguments, seed), arguments.difficulty_rest + 1
    else:
        sampler = load_object(name, PromptSampler, "--prompt-sampler")  # type: ignore[type-abstract]
        choose, patience = by_user(sampler, rows, seed, metadata, name), BARREN_EPOCHS
    return Order(choose, rates, patience=patience, name=name)


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
            if self._began_at == 0:  # otherwise earlier rows may have been usable
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
        self.given = int(state["given"])

    def skip_to(self, epoch: int) -> None:
        """Continue with the first row of ``epoch``."""
        self.epoch, self._order = epoch, None
        self.position = self._began_at = 0  # rows of this epoch that were read; where this object began it
        self._usable = 0  # found since then


def next_stream(given: Sequence[int], weights: Sequence[float]) -> int:
    """Which stream gives the next prompt, so that after any number n stream i has given n × weight, to within one.

    The eligible prompt that is due first, as in proportionate fair scheduling (Baruah et al. 1996): the j-th of a
    stream (from 0) of weight w may come at place floor(j / w) and is due before ceil((j + 1) / w).

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
