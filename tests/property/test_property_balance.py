"""Sequences are shared out so that the heaviest rank has hardly more work than the mean, where lengths allow it.

# covers: M2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given

from miles_async.train_data.balance import (
    MANY,
    Ranks,
    balance,
    exchanged,
    largest_differencing,
    longest_first,
    pack,
    split_to,
)
from miles_async.train_data.work import sequence_work

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)
RANKS = st.integers(1, 8)
CAPS = st.integers(20, 200)  # some sequences are longer than the lowest
QUADRATIC = st.sampled_from([0.0, 0.02, 0.5])
WAYS = st.sampled_from([largest_differencing, longest_first])
SEEDS = st.integers(0, 2**32 - 1)


def heaviest(plan: Ranks, lengths: list[int], quadratic: float) -> float:
    return max(work_of([i for members in bins for i in members], lengths, quadratic) for bins in plan)


def work_of(members: Iterable[int], lengths: list[int], quadratic: float) -> float:
    return sum(lengths[i] + quadratic * lengths[i] ** 2 for i in members)


def packed_then_dealt(lengths: list[int], ranks: int, max_tokens: int) -> Ranks:
    """The former way: all are packed, then micro-batches are dealt out in rounds by their tokens."""
    bins = pack(lengths, max_tokens)
    bins = split_to(bins, lengths, -(-len(bins) // ranks) * ranks)
    bins.sort(key=lambda members: -sum(lengths[i] for i in members))
    bins += [[] for _ in range(-len(bins) % ranks)]
    plan: Ranks = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(bins), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: totals[rank])
        for rank, members in zip(lightest_first, bins[start : start + ranks], strict=True):
            plan[rank].append(members)
            totals[rank] += sum(lengths[i] for i in members)
    return plan


@given(LENGTHS, RANKS, CAPS, QUADRATIC)
def test_every_sequence_is_in_one_micro_batch_that_fits(
    lengths: list[int], ranks: int, max_tokens: int, quadratic: float
) -> None:
    plan = balance(lengths, sequence_work(lengths, quadratic), ranks, max_tokens)
    assert len(plan) == ranks
    assert sorted(i for bins in plan for members in bins for i in members) == list(range(len(lengths)))
    assert all(len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens for b in plan for members in b)
    most = max(map(len, plan))
    for bins in plan:  # it has fewer only if it has no more sequences
        assert len(bins) == most or all(len(members) == 1 for members in bins)


@given(LENGTHS, RANKS, CAPS, QUADRATIC)
@example([21, 1, 38, 27, 45, 50, 7, 39, 12], 3, 73, 0.0)  # the former way is better for once
def test_never_worse_than_packing_first(lengths: list[int], ranks: int, max_tokens: int, quadratic: float) -> None:
    plan = balance(lengths, sequence_work(lengths, quadratic), ranks, max_tokens)
    before = packed_then_dealt(lengths, ranks, max_tokens)
    assert heaviest(plan, lengths, quadratic) <= heaviest(before, lengths, quadratic) * (1 + 1e-9)


@given(SEEDS, st.integers(1, 64), st.integers(12, 40), st.sampled_from([0.0, 1 / 27_000, 1 / 1000]))
def test_work_is_within_1_percent_of_the_mean_with_a_dozen_sequences_per_rank(
    seed: int, ranks: int, per_rank: int, quadratic: float
) -> None:
    """Lengths as of responses: from 1/20 of the longest on."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(400, 8192, ranks * per_rank).tolist()
    plan = balance(lengths, sequence_work(lengths, quadratic), ranks, 16_384)
    mean = work_of(range(len(lengths)), lengths, quadratic) / ranks
    assert heaviest(plan, lengths, quadratic) <= 1.01 * mean


@given(st.integers(1, 64), st.integers(1, 20), st.integers(1, 9000), CAPS)
def test_equal_lengths_are_shared_out_equally(ranks: int, per_rank: int, length: int, max_tokens: int) -> None:
    lengths = [length] * (ranks * per_rank)
    plan = balance(lengths, sequence_work(lengths, 0.1), ranks, max_tokens)
    assert {sum(map(len, bins)) for bins in plan} == {per_rank}


@given(SEEDS, st.integers(1, 16), st.sampled_from([0.0, 1 / 27_000]), st.sampled_from([400, 8000]))
def test_work_is_within_a_thousandth_of_the_mean_with_hundreds_of_sequences_per_rank(
    seed: int, ranks: int, quadratic: float, shortest: int
) -> None:
    """So packing first, which is not tried then, has nothing to gain."""
    lengths = np.random.default_rng(seed).integers(shortest, 8192, ranks * MANY + seed % ranks).tolist()
    plan = balance(lengths, sequence_work(lengths, quadratic), ranks, 16_384)
    mean = work_of(range(len(lengths)), lengths, quadratic) / ranks
    one_more = max(lengths) * (1 + quadratic * max(lengths)) if seed % ranks else 0  # of nearly equal ones
    assert heaviest(plan, lengths, quadratic) <= 1.001 * mean + one_more


@given(LENGTHS, RANKS, QUADRATIC, WAYS)
def test_sharing_out_and_exchanges_leave_a_partition_and_differ_by_one_sequence_at_most(
    lengths: list[int], parts: int, quadratic: float, share_out: Callable[..., list[list[int]]]
) -> None:
    work = sequence_work(lengths, quadratic)
    first = share_out(work, parts)
    after = exchanged(first, work)
    for shared in (first, after):
        assert sorted(i for part in shared for i in part) == list(range(len(lengths)))
        assert len(shared) == parts
    sums = [work[part].sum() for part in first]
    assert max(sums) - min(sums) <= work.max() * (1 + 1e-9)
    assert max(work[part].sum() for part in after) <= max(sums) * (1 + 1e-9)
