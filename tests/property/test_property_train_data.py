"""No sample is lost, doubled or misaligned between a cut and the ranks; ranks are in step.

# covers: M2, M5, M19, R10
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from miles_async.algorithms.advantages.estimators import grpo, rloo
from miles_async.staleness.versions import group_of
from miles_async.train_data.balance import pack, split_to
from miles_async.train_data.batch import BranchTable, digests, part, tabulate, token_advantages
from miles_async.train_data.batch_maker import FILLER
from miles_async.types import NO_VERSION, NOT_SHOWN, Float32, TrainBatch, TrainShard
from tests.property.builders import make_attempt, make_sample, split

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@st.composite
def tables(draw: st.DrawFn) -> BranchTable:
    """Up to five groups of one to four samples of one to three branches; every token differs from all others.

    An advantage per sample, or per token; with experts, or without.
    """
    versions = st.lists(st.integers(NO_VERSION, 4), max_size=7).flatmap(
        lambda before: st.integers(0, 4).map(lambda last: [*before, last])
    )
    groups, next_token, sizes = [], 0, draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    for attempt_id, size in enumerate(sizes):
        samples = []
        for _ in range(size):
            sample = make_sample(
                draw(versions),
                more_branches=draw(st.just([]) | st.lists(versions, max_size=2)),
                prompt_length=draw(st.integers(1, 3)),
                reward=draw(st.sampled_from([0.0, 0.5, 1.0])),
                first_token=next_token,
            )
            next_token += sum(len(branch.tokens) for branch in sample.branches)
            samples.append(sample)
        groups.append(group_of(make_attempt(attempt_id), samples))
    rewards = np.array([s.reward for g in groups for s in g.samples], dtype=np.float32)
    routed = draw(st.booleans())
    if draw(st.booleans()):
        return tabulate(groups, np.arange(1, next_token + 1, dtype=np.float32), with_experts=routed)
    return tabulate(groups, grpo(rewards, np.array(sizes)), with_experts=routed)


def branches_of(batch: TrainBatch) -> dict[int, tuple[object, ...]]:
    """Everything that is known of each branch, by its first token."""
    result: dict[int, tuple[object, ...]] = {}
    for s in range(batch.num_branches):
        tokens = slice(batch.offsets[s], batch.offsets[s + 1])
        per_token = (
            batch.tokens, batch.loss_mask, batch.rollout_logprobs, batch.weight_versions, token_advantages(batch)
        )  # fmt: skip
        per_branch = (batch.oldest_versions, batch.rewards, batch.sample_ids, batch.group_ids)
        first = int(batch.tokens[batch.offsets[s]])
        result[first] = (*(tuple(a[tokens]) for a in per_token), *(a[s].item() for a in per_branch))
        if (experts := batch.routed_experts) is not None:  # they tell which token they belong to
            assert (experts[tokens] @ np.array([1, 251])).tolist() == batch.tokens[tokens].tolist()
    assert len(result) == batch.num_branches
    return result


def whole(table: BranchTable) -> TrainBatch:
    return table.join(range(len(table.branches)))


@given(tables(), st.data())
def test_join_and_part_keep_every_array_aligned(table: BranchTable, data: st.DataObject) -> None:
    count = len(table.branches)
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1))
    known = list(branches_of(whole(table)).items())
    joined = table.join(chosen)
    assert branches_of(joined) == dict(known[index] for index in chosen)
    first = data.draw(st.integers(0, len(chosen) - 1))
    end = data.draw(st.integers(first + 1, len(chosen)))
    cut = part(joined, first, end)
    assert branches_of(cut) == dict(known[index] for index in chosen[first:end])
    assert cut.offsets[0] == 0
    assert np.shares_memory(cut.tokens, joined.tokens)


@given(tables())
def test_a_table_says_of_every_branch_what_its_tokens_say(table: BranchTable) -> None:
    # covers: C1
    batch = whole(table)
    for s in range(batch.num_branches):
        tokens = slice(batch.offsets[s], batch.offsets[s + 1])
        versions = batch.weight_versions[tokens][batch.loss_mask[tokens] != 0].tolist()
        assert (table.oldest_versions[s], table.newest_versions[s]) == (min(versions), max(versions))
        assert table.loss_tokens[s] == len(versions)
        assert table.branches[s].loss_versions().tolist() == versions


@given(LENGTHS, st.integers(20, 120))
def test_packing_is_a_partition_within_the_limit_and_tight(lengths: list[int], max_tokens: int) -> None:
    bins = pack(lengths, max_tokens)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in members) for members in bins]
    assert all(size <= max_tokens or len(members) == 1 for size, members in zip(sizes, bins, strict=True))
    # No two bins fit together, so all but one are more than half full.
    assert len(bins) == 1 or sum(sorted(sizes)[:2]) > max_tokens


@given(LENGTHS, st.integers(50, 120), st.integers(1, 40))
def test_splitting_bins_reaches_any_count_up_to_one_sample_each(
    lengths: list[int], max_tokens: int, count: int
) -> None:
    before = pack(lengths, max_tokens)
    bins = split_to(before, lengths, count)
    assert len(bins) == min(max(count, len(before)), len(lengths))
    assert all(bins)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))


@given(tables(), st.integers(1, 4), st.integers(5, 30), st.integers(1, 20), st.booleans())
def test_split(table: BranchTable, dp_size: int, max_tokens: int, steps: int, share: bool) -> None:
    batch = whole(table)
    shards = split(table, dp_size, max_tokens, 4, optimizer_steps=steps, quadratic_work=0.05, share_prefixes=share)
    routed = {m.routed_experts is not None for s in shards for step in s.optimizer_steps for m in step}
    assert routed == {table.with_experts}
    assert [shard.target_version for shard in shards] == [4] * dp_size
    assert_every_branch_once(batch, shards)
    assert_in_step(shards, max_tokens)
    # One rank alone gets the same samples per optimizer step, and the same tokens to divide the loss by.
    (alone,) = split(table, 1, max_tokens, 4, optimizer_steps=steps)
    assert all(shard.loss_tokens == alone.loss_tokens for shard in shards)
    assert sum(alone.loss_tokens) == batch.loss_mask.sum()
    samples = int(table.sample_ids[-1]) + 1
    assert len(alone.optimizer_steps) == steps
    seen: set[int] = set()
    for step, micro_batches in enumerate(alone.optimizer_steps):
        expected = {i for m in micro_batches for i in m.sample_ids.tolist()} - {FILLER}
        found = {i for s in shards for m in s.optimizer_steps[step] for i in m.sample_ids.tolist()} - {FILLER}
        assert found == expected
        assert expected == set(range(len(seen), len(seen) + len(expected)))  # in batch order: groups stay together
        assert 0 <= len(expected) - samples // len(alone.optimizer_steps) <= 1  # however many branches they have
        assert not seen & expected  # all branches of a sample are in one step
        seen |= expected


@given(tables(), st.integers(1, 4), st.integers(5, 30), st.integers(1, 20), st.booleans(), st.data())
def test_shards_say_where_the_branches_of_shown_groups_are(
    table: BranchTable, dp_size: int, max_tokens: int, steps: int, share: bool, data: st.DataObject
) -> None:
    groups = data.draw(st.sets(st.integers(0, int(table.group_ids[-1]))))
    wanted = np.flatnonzero(np.isin(table.group_ids, [*groups])).tolist()
    nothing_shown = split(table, dp_size, max_tokens, 4, optimizer_steps=steps, share_prefixes=share)
    table = replace(table, shown=np.isin(table.group_ids, [*groups]))
    shards = split(table, dp_size, max_tokens, 4, optimizer_steps=steps, share_prefixes=share)
    assert digests(shards) == digests(nothing_shown)  # a replay shows nothing
    found = {}
    for batch in (batch for shard in shards for step in shard.optimizer_steps for batch in step):
        for index, branch in enumerate(batch.shown.tolist()):
            assert branch not in found
            if branch != NOT_SHOWN:
                found[branch] = batch.tokens[slice(*batch.offsets[index : index + 2])].tolist()
    assert found == {branch: table.branches[branch].tokens.tolist() for branch in wanted}


def assert_every_branch_once(batch: TrainBatch, shards: tuple[TrainShard, ...]) -> None:
    found: dict[int, tuple[object, ...]] = {}
    for micro_batch in (m for shard in shards for step in shard.optimizer_steps for m in step):
        assert_aligned(micro_batch)
        if micro_batch.sample_ids.tolist() == [FILLER]:
            assert not micro_batch.loss_mask.any()
            continue
        branches = branches_of(micro_batch)
        assert not branches.keys() & found.keys()
        found |= branches
    assert found == branches_of(batch)


def assert_aligned(batch: TrainBatch) -> None:
    tokens = (batch.tokens, batch.loss_mask, batch.rollout_logprobs, batch.weight_versions)
    tokens += tuple(each for each in (batch.routed_experts, batch.teacher_logprobs) if each is not None)
    branches = (batch.oldest_versions, batch.rewards, batch.sample_ids, batch.group_ids, batch.shown)
    assert {len(array) for array in tokens} == {int(batch.offsets[-1])}
    assert {len(array) for array in branches} == {batch.num_branches}
    assert len(batch.advantages) in (batch.num_branches, len(batch.tokens))


def assert_in_step(shards: tuple[TrainShard, ...], max_tokens: int) -> None:
    """How work is shared out has properties of its own: test_property_balance.py."""
    for micro_batches in zip(*(shard.optimizer_steps for shard in shards), strict=True):
        assert len({len(of_rank) for of_rank in micro_batches}) == 1
        assert all(m.num_branches == 1 or len(m.tokens) <= max_tokens for of_rank in micro_batches for m in of_rank)
        for of_rank in micro_batches:
            fillers = sum(m.sample_ids[0] == FILLER for m in of_rank)
            assert fillers == 0 or all(m.num_branches == 1 for m in of_rank)  # only when nothing can be split further
            assert all(len(m.tokens) == 1 for m in of_rank if m.sample_ids[0] == FILLER)


@given(
    st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=6), min_size=1, max_size=5),
    st.sampled_from([grpo, partial(grpo, normalize_std=False), rloo]),
)
def test_advantages_are_centred_ordered_and_zero_without_spread(
    rewards: list[list[float]], estimator: Callable[..., Float32]
) -> None:
    flat = np.array([r for group in rewards for r in group], dtype=np.float32)
    found = estimator(flat, np.array([len(group) for group in rewards]))
    start = 0
    for group in rewards:
        mine = found[start : start + len(group)]
        assert abs(float(mine.sum())) < 1e-3
        assert (np.diff(mine[np.argsort(group)]) >= -1e-6).all()
        if min(group) == max(group):
            assert (mine == 0).all()
        start += len(group)
