"""Groups become a batch only after their tokens were judged once more (C1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from miles_async.algorithms.advantages.estimators import Grpo
from miles_async.arguments import AlgorithmArguments
from miles_async.errors import ConfigurationError, ContractViolation
from miles_async.train_data.batch_maker import BatchMaker
from miles_async.types import Group
from tests.property.builders import make_group


def ages(maker: BatchMaker, group: Group, target_version: int) -> Mapping[int, int]:
    return maker.make((group,), target_version, batch_id=1, put=id).ages


def maker(bound: int | None) -> BatchMaker:
    return BatchMaker(
        estimator=Grpo(AlgorithmArguments()), dp_size=1, max_tokens=64, samples_per_optimizer_step=2, bound=bound
    )


def test_a_group_that_is_too_old_never_becomes_a_batch() -> None:
    """Whatever let it through before: the versions of its tokens are read again here."""  # covers: C1
    group = make_group(1, versions=[(5, 5), (5, 3, 5)])
    assert ages(maker(2), group, 5) == {0: 1, 2: 1}
    with pytest.raises(ContractViolation, match=r"expected ages up to --max-weight-staleness 1 .*\{1: 2\}"):
        ages(maker(1), group, 5)


def test_samples_without_experts_are_refused_where_they_are_replayed() -> None:  # covers: M19
    group = make_group(1)
    bare = msgspec.structs.replace(group.samples[1], routed_experts=None)
    mixed = msgspec.structs.replace(group, samples=(group.samples[0], bare))
    assert maker(None).shards((mixed,), 0)[0].optimizer_steps[0][0].routed_experts is None
    with pytest.raises(ConfigurationError, match="--use-rollout-routing-replay: expected the experts of every token"):
        ages(replace(maker(None), with_experts=True), mixed, 0)


def test_without_a_bound_any_age_is_trained() -> None:
    assert ages(maker(None), make_group(1, versions=[(0,), (9,)]), 9) == {0: 1, 9: 1}
