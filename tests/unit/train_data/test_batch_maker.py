"""Groups become a batch only after their tokens were judged once more (C1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from miles_async.algorithms.advantages.estimators import Grpo
from miles_async.arguments import AlgorithmArguments, Arguments, OptimizerArguments, RolloutArguments
from miles_async.errors import ConfigurationError, ContractViolation
from miles_async.train_data.batch import digests
from miles_async.train_data.batch_maker import BatchMaker
from miles_async.types import Group, Picture
from miles_async.wiring.decisions import make_batches
from tests.property.builders import make_group


def ages(maker: BatchMaker, group: Group, target_version: int) -> Mapping[int, int]:
    return maker.make((group,), target_version, batch_id=1, put=id).ages


def maker(bound: int | None) -> BatchMaker:
    return BatchMaker(estimator=Grpo(AlgorithmArguments()), dp_size=1, max_tokens=64, optimizer_steps=1, bound=bound)


def test_a_group_that_is_too_old_never_becomes_a_batch() -> None:
    """Whatever let it through before: the versions of its tokens are read again here."""  # covers: C1
    group = make_group(1, versions=[(5, 5), (5, 3, 5)])
    assert ages(maker(2), group, 5) == {0: 1, 2: 1}
    with pytest.raises(ContractViolation, match=r"expected ages up to --max-weight-staleness 1 .*\{1: 2\}"):
        ages(maker(1), group, 5)


def test_a_batch_that_lost_samples_has_as_many_optimizer_steps() -> None:
    """Schedules of the run count them."""
    arguments = replace(
        Arguments(),
        rollout=RolloutArguments(rollout_batch_size=2, n_samples_per_prompt=4, num_rollout=5),
        optimizer=OptimizerArguments(global_batch_size=2, ppo_epochs=3),
    )
    assert arguments.optimizer_steps == 5 * 3 * 4
    for sizes in ((4, 4), (2, 3), (2, 1)):
        groups = tuple(make_group(number, versions=[(5, 5)] * size) for number, size in enumerate(sizes))
        (shard,) = make_batches(arguments).shards(groups, 5)
        assert len(shard.optimizer_steps) == 4


def test_samples_without_experts_are_refused_where_they_are_replayed() -> None:  # covers: M19
    group = make_group(1)
    bare = msgspec.structs.replace(group.samples[1], routed_experts=None)
    mixed = msgspec.structs.replace(group, samples=(group.samples[0], bare))
    assert maker(None).shards((mixed,), 0)[0].optimizer_steps[0][0].routed_experts is None
    with pytest.raises(ConfigurationError, match="--use-rollout-routing-replay: expected the experts of every token"):
        ages(replace(maker(None), with_experts=True), mixed, 0)


def test_without_a_bound_any_age_is_trained() -> None:
    assert ages(maker(None), make_group(1, versions=[(0,), (9,)]), 9) == {0: 1, 9: 1}


def test_images_go_with_the_tokens_of_their_samples() -> None:
    groups = tuple(make_group(number) for number in range(3))
    marked = []
    for number, group in enumerate(groups):
        picture = Picture(content=b"", digest=str(number), width=28, height=28)
        own = (picture,) * number  # the first group has none
        samples = tuple(
            msgspec.structs.replace(sample, pictures=own, tokens=np.full_like(sample.tokens, number))
            for sample in group.samples
        )
        marked.append(msgspec.structs.replace(group, samples=samples))
    shards = replace(maker(None), dp_size=2, max_tokens=8).shards(tuple(marked), 0)
    batches = [batch for shard in shards for step in shard.optimizer_steps for batch in step]
    seen = set()
    for batch in batches:
        assert len(batch.pictures) == batch.num_branches
        for start, own, sample in zip(batch.offsets, batch.pictures, batch.sample_ids, strict=False):
            if sample >= 0:  # no filler
                number = int(batch.tokens[start])
                assert [picture.digest for picture in own] == [str(number)] * number
                seen.add(number)
            else:
                assert own == ()
    assert seen == {0, 1, 2}


def test_a_batch_of_texts_has_no_place_for_images() -> None:
    assert maker(None).flatten((make_group(1),)).pictures is None


def test_digests_tell_images_apart() -> None:
    group = make_group(1)

    def found(digest: str) -> dict[str, str]:
        own = (Picture(content=b"", digest=digest, width=28, height=28),)
        samples = tuple(msgspec.structs.replace(sample, pictures=own) for sample in group.samples)
        return digests(maker(None).shards((msgspec.structs.replace(group, samples=samples),), 0))

    assert found("a") == found("a")
    assert {name for name, value in found("a").items() if found("b")[name] != value} == {"pictures"}
    assert "pictures" not in digests(maker(None).shards((group,), 0))
