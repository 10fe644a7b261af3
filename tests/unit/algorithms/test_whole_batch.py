"""What looks at a whole batch sees the tokens of all ranks, however they are dealt."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from miles_async.algorithms import registry
from miles_async.algorithms.objective import Objective
from miles_async.algorithms.whole_batch.transform import Gather, WholeBatch, with_advantages
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.unit.algorithms.cases import CASES, Case, objective_of
from tests.unit.algorithms.ranks import alone, on_ranks
from tests.unit.algorithms.steps import Step, micro_batch


def seen(batch: TokenBatch) -> Tensor:
    """The advantages, or what the loss found in the whole batch."""
    return batch.computed.get("surveyed", batch.advantages)


def dealt(step: Step, objective: Objective, ranks: Sequence[Sequence[Sequence[int]]]) -> dict[int, Tensor]:
    """What each sequence gets; ``ranks``: the sequences of each rank's micro-batches."""

    def run(rank: int, gather: Gather) -> dict[int, Tensor]:
        parts, found = ranks[rank], dict[int, Tensor]()
        batches = [micro_batch([step[index] for index in part])[1] for part in parts]
        for part, batch in zip(parts, objective.prepared(batches, WholeBatch(gather=gather)), strict=True):
            found.update(zip(part, seen(batch).split([len(step[index].old) for index in part]), strict=True))
        return found

    return {index: values for of_rank in on_ranks(len(ranks), run) for index, values in of_rank.items()}


@pytest.mark.parametrize("name", ["REINFORCE++", "m2po", "clip_cov, drawn", "kl_cov", "sat", "sat_gspo"])
@pytest.mark.parametrize(
    "ranks", [[[[0, 1, 2, 3]], [[4, 5], [6, 7]]], [[[7], [5]], [[0, 6], [1]], [[2, 3, 4]]]], ids=["two", "three"]
)
def test_ranks_change_nothing(name: str, ranks: list[list[list[int]]]) -> None:
    case = next(case for case in CASES if case.name == name)
    step, objective = case.step(2), objective_of(case)
    whole = micro_batch(step)[1]
    expected = seen(objective.prepared([whole], WholeBatch(gather=alone))[0])
    found = dealt(step, objective, ranks)
    assert torch.allclose(torch.cat([found[index] for index in range(len(step))]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_changes_a_batch_says_so(case: Case) -> None:
    """The trainer leaves the rest out, and the forward passes for it."""
    objective = objective_of(case)
    batch = micro_batch(case.step(2))[1]
    (prepared,) = objective.prepared([batch], WholeBatch(gather=alone))
    changed = "surveyed" in prepared.computed or not torch.equal(prepared.advantages, batch.advantages)
    assert bool(objective.transforms) is changed


def test_advantages_without_spread_are_whitened_to_zero() -> None:
    objective = objective_of(next(case for case in CASES if case.name == "REINFORCE++"))
    objective = dataclasses.replace(objective, transforms=objective.transforms[1:])
    _, batch = micro_batch(CASES[0].step(0))
    zero = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    (found,) = objective.prepared([zero], WholeBatch(gather=alone))
    assert (found.advantages == 0).all()


class Halved:
    """Somebody's next method."""

    needs = ("trainer_logprobs",)
    weighs_trajectories = False

    def __init__(self, arguments: AlgorithmArguments) -> None: ...

    def prepare(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        return with_advantages(batches, [batch.advantages / 2 for batch in batches])


def test_another_method_is_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_transforms")
    module.__dict__["Halved"] = Halved
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = (*registry.TOKEN_TRANSFORMS, ("--halve", lambda _: True, "own_transforms:Halved"))
    monkeypatch.setattr(registry, "TOKEN_TRANSFORMS", rows)
    objective = objective_of(next(case for case in CASES if case.name == "REINFORCE++"))
    batch = micro_batch(CASES[0].step(0))[1]
    before = dataclasses.replace(objective, transforms=objective.transforms[:-1])
    (expected,), (found,) = (made.prepared([batch], WholeBatch(gather=alone)) for made in (before, objective))
    assert torch.equal(found.advantages, expected.advantages / 2)
    assert "trainer_logprobs" in objective.needs
