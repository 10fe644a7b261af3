"""Batches, packing and the data-parallel split by example; the properties are in tests/property.

# covers: M2, R10
"""

from __future__ import annotations

import pickle
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from miles_async.algorithms.advantages.estimators import Grpo
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import ConfigurationError, ContractViolation, VersionUnknownError
from miles_async.staleness.versions import group_of
from miles_async.train_data.balance import pack, split_to
from miles_async.train_data.batch import BranchTable, tabulate, token_advantages
from miles_async.train_data.batch_maker import FILLER
from miles_async.types import NO_VERSION, Branch, Sample, TrainBatch
from tests.property.builders import make_attempt, make_sample, split


def table_of(response_lengths: list[int]) -> BranchTable:
    samples = [make_sample([3] * length, prompt_length=1) for length in response_lengths]
    group = group_of(make_attempt(), samples)
    return tabulate([group], np.arange(len(samples), dtype=np.float32))


def whole(table: BranchTable) -> TrainBatch:
    return table.join(range(len(table.branches)))


def with_teacher(branch: Branch) -> Branch:
    """The branch or sample with log-probs of a teacher, which tell tokens apart."""
    logprobs = (-0.5 * branch.tokens * branch.loss_mask).astype(np.float32)
    branch = structs.replace(branch, teacher_logprobs=logprobs)
    return (
        structs.replace(branch, more_branches=tuple(map(with_teacher, branch.more_branches)))
        if isinstance(branch, Sample)
        else branch
    )


def test_tokens_are_copied_once() -> None:
    # covers: R10
    """A batch takes 13 bytes per token beside its samples, and little more while it is made."""
    table = table_of([20_000] * 50)
    tokens, per_token = int(table.lengths.sum()), 4 + 1 + 4 + 4
    tracemalloc.start()
    shards = split(table, dp_size=2, max_tokens=40_000, target_version=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert per_token * tokens <= peak < 1.1 * per_token * tokens
    for shard in shards:
        (micro_batches,) = shard.optimizer_steps
        assert len({id(micro_batch.tokens.base) for micro_batch in micro_batches}) == 1


def test_a_shard_is_pickled_without_a_copy_of_its_arrays() -> None:
    """Ray does the same, and moves the buffers into its object store."""
    table = replace(table_of([2000] * 6), with_experts=True)
    answered = tuple(map(with_teacher, table.branches))
    table = replace(table, branches=answered, with_teacher=True)
    (shard,) = split(table, 1, 4000, target_version=3)
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(in_band, buffers=buffers)
    for before, after in zip(shard.optimizer_steps[0], again.optimizer_steps[0], strict=True):
        names = {*before.__struct_fields__} - {"pictures"}  # which are no arrays, and these samples have none
        assert all(np.shares_memory(getattr(before, name), getattr(after, name)) for name in names)
    assert len(in_band) < 10_000


def test_batch_is_flat_with_offsets() -> None:
    samples = [make_sample([5, 3], reward=1.0), make_sample([4, NO_VERSION, 6], reward=0.0, first_token=10)]
    advantages = np.array([0.5, -0.5], dtype=np.float32)
    assert whole(tabulate([group_of(make_attempt(), samples)], advantages)).routed_experts is None
    batch = whole(tabulate([group_of(make_attempt(), samples)], advantages, with_experts=True))
    assert batch.tokens.tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 14]
    assert batch.offsets.tolist() == [0, 4, 9]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1]
    assert batch.weight_versions.tolist() == [-1, -1, 5, 3, -1, -1, 4, -1, 6]
    assert batch.oldest_versions.tolist() == [3, 4]
    assert batch.rewards.tolist() == [1, 0]
    assert batch.advantages.tolist() == [0.5, -0.5]
    dtypes = {name: getattr(batch, name).dtype for name in batch.__struct_fields__ if getattr(batch, name) is not None}
    assert dtypes == {
        "tokens": np.int32, "offsets": np.int64, "loss_mask": np.uint8, "rollout_logprobs": np.float32,
        "weight_versions": np.int32, "oldest_versions": np.int32, "advantages": np.float32, "rewards": np.float32,
        "sample_ids": np.int64, "group_ids": np.int64, "shown": np.int64, "routed_experts": np.uint8,
    }  # fmt: skip


def test_a_teacher_s_log_probs_stay_with_their_tokens_on_the_way_to_ranks() -> None:
    samples = [with_teacher(make_sample([5] * length, first_token=20 * length)) for length in (3, 1, 7)]
    samples.append(with_teacher(make_sample([4, NO_VERSION, 6], more_branches=[[6]], first_token=300)))
    group = group_of(make_attempt(), samples)
    table = tabulate([group], np.zeros(4, np.float32), with_teacher=True)
    shards = split(table, dp_size=3, max_tokens=9, target_version=6)
    seen = 0
    for batch in (batch for shard in shards for step in shard.optimizer_steps for batch in step):
        assert batch.teacher_logprobs.tolist() == (-0.5 * batch.tokens * batch.loss_mask).tolist()
        seen += int(np.count_nonzero(batch.teacher_logprobs))
    assert seen == int(table.loss_tokens.sum())
    assert whole(tabulate([group], np.zeros(4, np.float32))).teacher_logprobs is None
    with pytest.raises(ConfigurationError, match="--use-opd: expected the teacher's log-prob of every token"):
        tabulate([group_of(make_attempt(), [samples[0], make_sample([5])])], np.zeros(2, np.float32), with_teacher=True)


def test_branches_of_a_sample_share_its_reward_and_advantage() -> None:
    samples = [make_sample([5], reward=1.0, more_branches=[[4], [6, 6]]), make_sample([5], reward=0.0)]
    group = group_of(make_attempt(), samples)
    advantages = Grpo(AlgorithmArguments(grpo_std_normalization=False))([group])
    assert advantages.tolist() == [0.5, -0.5]  # each trajectory counts once
    batch = whole(tabulate([group], advantages))
    assert batch.sample_ids.tolist() == [0, 0, 0, 1]
    assert np.diff(batch.offsets).tolist() == [3, 3, 4, 3]
    assert batch.oldest_versions.tolist() == [5, 4, 6, 5]
    assert batch.rewards.tolist() == [1, 1, 1, 0]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_an_estimator_may_tell_tokens_apart() -> None:
    """Tokens without loss have none, whatever it says of them."""
    samples = [make_sample([5], reward=1.0, more_branches=[[4]]), make_sample([5, NO_VERSION, 5], reward=0.0)]
    group = group_of(make_attempt(), samples)
    given = np.arange(1, 12)
    given_anything = np.where(np.isin(given, [1, 2, 4, 5, 7, 8, 10]), np.nan, given)
    table = tabulate([group], given_anything)
    batch = whole(table)
    assert batch.loss_mask.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1]
    assert batch.advantages.tolist() == [0, 0, 3, 0, 0, 6, 0, 0, 9, 0, 11]
    assert batch.advantages.dtype == np.float32
    assert table.join([2, 0]).advantages.tolist() == [0, 0, 9, 0, 11, 0, 0, 3]
    with pytest.raises(ContractViolation, match=r".* advantage for every loss token; samples \[1\]"):
        tabulate([group], np.where(given == 9, np.inf, given))


def test_advantages_of_samples_are_those_of_their_loss_tokens() -> None:
    samples = [make_sample([5], more_branches=[[4]]), make_sample([5, NO_VERSION, 5])]
    batch = whole(tabulate([group_of(make_attempt(), samples)], np.array([0.5, -0.5], np.float32)))
    assert token_advantages(batch).tolist() == [0, 0, 0.5, 0, 0, 0.5, 0, 0, -0.5, 0, -0.5]


def test_advantages_of_nothing_are_refused() -> None:
    group = group_of(make_attempt(), [make_sample([5]), make_sample([5])])
    with pytest.raises(ContractViolation, match=r"--advantage-estimator: expected 2 .* or 6, .* found 3"):
        tabulate([group], np.zeros(3, np.float32))


def test_optimizer_steps_take_samples_in_order_and_keep_their_branches_together() -> None:
    samples = [make_sample([3]), make_sample([3], more_branches=[[3]] * 5), make_sample([3]), make_sample([3])]
    table = tabulate([group_of(make_attempt(), samples)], np.zeros(4, np.float32))
    (shard,) = split(table, 1, 100, 3, optimizer_steps=2)
    steps = [sorted(i for m in step for i in m.sample_ids.tolist()) for step in shard.optimizer_steps]
    assert steps == [[0, 1, 1, 1, 1, 1, 1], [2, 3]]
    assert shard.loss_tokens == (7, 2)


@pytest.mark.parametrize("versions", [[-1, -1], [-1, 4]])
def test_batch_needs_a_version_for_every_loss_token(versions: list[int]) -> None:
    fine = make_sample([2, 2])
    all_carry_loss = structs.replace(make_sample(versions, prompt_length=0), loss_mask=np.ones(2, np.uint8))
    none_does = structs.replace(fine, loss_mask=np.zeros(4, np.uint8))
    for sample in (all_carry_loss, none_does):
        group = structs.replace(group_of(make_attempt(), [fine, fine]), samples=(fine, sample))
        with pytest.raises(VersionUnknownError):
            tabulate([group], np.zeros(2, np.float32))


def test_pack_fills_the_fullest_bin_that_has_room() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert pack([], 10) == []


def test_a_sample_longer_than_a_micro_batch_has_one_of_its_own() -> None:
    assert pack([3, 11, 7, 12], 10) == [[3], [1], [2, 0]]
    shards = split(table_of([30, 4, 4, 4]), 2, 10, 0)
    micro_batches = [m for shard in shards for m in shard.optimizer_steps[0]]
    assert sorted(m.sample_ids.tolist() for m in micro_batches if len(m.tokens) > 10) == [[0]]
    assert sum(shards[0].loss_tokens) == 42


def test_splitting_halves_the_largest_bin() -> None:
    assert sorted(map(sorted, split_to([[0, 1, 2], [3]], [4, 3, 2, 5], 3))) == [[0], [1, 2], [3]]
    assert sorted(map(sorted, split_to([[3, 4], [0, 1, 2]], [4, 3, 2, 1, 1], 3))) == [[0], [1, 2], [3, 4]]


def test_a_batch_needs_a_branch_and_a_rank() -> None:
    with pytest.raises(AssertionError):
        split(table_of([9]), dp_size=0, max_tokens=10, target_version=7)


def test_ranks_get_equal_numbers_of_micro_batches() -> None:
    shards = split(table_of([9, 9, 9, 9, 4, 4]), dp_size=2, max_tokens=10, target_version=7)
    assert [len(step) for shard in shards for step in shard.optimizer_steps] == [3, 3]
    assert [sum(len(m.tokens) for m in shard.optimizer_steps[0]) for shard in shards] == [25, 25]
    assert {shard.target_version for shard in shards} == {7}
    assert shards[0].loss_tokens == shards[1].loss_tokens == (44,)


@pytest.mark.parametrize(("samples", "steps"), [(12, [4, 4, 4]), (11, [4, 4, 3]), (4, [2, 1, 1]), (2, [1, 1, 0])])
def test_a_batch_of_fewer_samples_has_smaller_steps_not_fewer(samples: int, steps: list[int]) -> None:
    for shard in split(table_of([3] * samples), 2, 100, 0, optimizer_steps=3):
        assert len(shard.optimizer_steps) == len(steps)
    (shard,) = split(table_of([3] * samples), 1, 100, 0, optimizer_steps=3)
    assert [sum((m.sample_ids != FILLER).sum() for m in step) for step in shard.optimizer_steps] == steps
    assert shard.loss_tokens == tuple(3 * samples for samples in steps)


def test_filler_takes_the_place_of_a_micro_batch_that_no_sample_is_left_for() -> None:
    shards = split(table_of([9, 9, 5]), dp_size=2, max_tokens=10, target_version=0)
    micro_batches = [m for shard in shards for m in shard.optimizer_steps[0]]
    (filler,) = [m for m in micro_batches if m.sample_ids.tolist() == [FILLER]]
    assert filler.loss_mask.sum() == 0
    assert len(filler.tokens) == 1
    assert shards[0].loss_tokens == (23,)


def test_packing_a_large_batch_takes_no_time() -> None:
    lengths = np.random.default_rng(0).integers(1, 8192, size=20_000).tolist()
    started = time.perf_counter()
    bins = pack(lengths, 8192)
    assert time.perf_counter() - started < 5  # 0.1 s when alone; quadratic would be minutes
    assert len(bins) < 1.05 * sum(lengths) / 8192
