"""Samplers of prompts: which rows an epoch has, by what is known when it begins.

Pass rates are frozen for an epoch, and saved with the cursor. So an epoch's order is decided once, whatever is found
out meanwhile, and a resumed run continues in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from operator import index as as_index

import numpy as np

from miles_async.api import EpochRows, PromptSampler
from miles_async.arguments.data import DataArguments
from miles_async.errors import CheckpointError, DataError
from miles_async.prompts.order import Order, UniformOrder
from miles_async.runtime.hooks import load_object
from miles_async.runtime.user_code import call_user_code, raised
from miles_async.types import Int64, JsonObject

Rates = Mapping[int, float]
"""Row → share of its last group's samples that solved it."""

Choose = Callable[[int, Rates], Int64]
"""(epoch, pass rates when it began) → indices of its rows, in order."""


class SampledOrder:
    """The order of a sampler that looks at pass rates."""

    def __init__(self, choose: Choose, rates: Callable[[], Rates], *, patience: int, name: str) -> None:
        """``rates``: those known now. ``name``: of the sampler, for messages."""
        self.patience = patience
        self._choose = choose
        self._rates = rates
        self._name = name
        self._frozen: Rates = {}
        self._digest = ""

    def begin(self, epoch: int) -> Int64:
        """See ``prompts.order.Order``."""
        self._frozen = dict(self._rates())
        return self._chosen(epoch)

    def state(self) -> JsonObject:
        """See ``prompts.order.Order``."""
        return {"rates": rates_to_json(self._frozen), "order": self._digest}

    def restore(self, epoch: int, state: JsonObject) -> Int64:
        """See ``prompts.order.Order``."""
        self._frozen = rates_from_json(state.get("rates", []))
        order = self._chosen(epoch)
        if self._digest != state.get("order"):
            raise CheckpointError(
                f"--prompt-sampler {self._name} orders epoch {epoch} otherwise than before the checkpoint: it has to "
                "depend on its argument alone. Mend it, or add --load-anyway prompt_data to begin the next epoch"
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


def difficulty_window(rows: range, uniform: UniformOrder, arguments: DataArguments, seed: Sequence[int]) -> Choose:
    """Rows outside the window rest: each comes in one of ``--difficulty-rest`` epochs in a row. Others come in each."""
    turns = np.random.default_rng([*seed, len(rows)]).integers(arguments.difficulty_rest, size=len(rows))

    def choose(epoch: int, rates: Rates) -> Int64:
        resting = np.zeros(len(rows), bool)
        for row, rate in rates.items():
            if row in rows:
                resting[row - rows.start] = rate <= arguments.difficulty_low or rate >= arguments.difficulty_high
        order = uniform.begin(epoch)
        has_turn = ~resting | ((turns + epoch) % arguments.difficulty_rest == 0)
        return order[has_turn[order - rows.start]]

    return choose


def by_user(
    sampler: PromptSampler, rows: range, uniform: UniformOrder, metadata: Callable[[int], JsonObject], name: str
) -> Choose:
    """The order that a user's sampler gives. It raises DataError if that is none."""

    def choose(epoch: int, rates: Rates) -> Int64:
        where = f"--prompt-sampler {name}: epoch {epoch}"
        known = {row: rate for row, rate in rates.items() if row in rows}
        given = EpochRows(epoch=epoch, rows=rows, pass_rates=known, random=uniform.random(epoch), metadata=metadata)
        try:
            order = [as_index(row) for row in call_user_code(sampler, given)]
        except Exception as error:  # supervision point: users' code raises what it likes
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
    uniform, name = UniformOrder(rows, seed, shuffled=arguments.rollout_shuffle), arguments.prompt_sampler
    if name == "uniform":
        return uniform
    if name == "difficulty":
        choose, patience = difficulty_window(rows, uniform, arguments, seed), arguments.difficulty_rest + 1
    else:
        sampler = load_object(name, PromptSampler, "--prompt-sampler")  # type: ignore[type-abstract]
        choose, patience = by_user(sampler, rows, uniform, metadata, name), BARREN_EPOCHS
    return SampledOrder(choose, rates, patience=patience, name=name)


BARREN_EPOCHS = 100  # of a user's sampler whose rows are all too long, in a row, before the run ends
