"""Assign sequences to data-parallel ranks: equal work first, equally many micro-batches second.

A micro-batch has at most ``--max-tokens-per-gpu`` tokens, or one longer sequence.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
GOOD_ENOUGH = 1.001  # heaviest rank ÷ mean below which exchanges don't pay
MANY = 100  # sequences per rank that are balanced well, and ten times as fast, by taking the longest first

Bin = list[int]
"""Indices of the sequences of a micro-batch."""

Ranks = list[list[Bin]]
"""Micro-batches of each rank. A rank with fewer sequences than others have micro-batches may have fewer."""


def balance(lengths: Sequence[int], work: Float64, ranks: int, max_tokens: int) -> Ranks:
    """Assign every index of ``lengths`` to one micro-batch of one rank, so that the heaviest rank, which decides how
    long a step takes, is light.

    Takes the better of two plans. Sharing out first nearly always wins; with few sequences per rank, packing first may
    win or need fewer micro-batches for the same work. Deterministic.

    Args:
        lengths: tokens of each sequence.
        work: [S], of each sequence, in any unit.
        ranks: at least 1.
        max_tokens: per micro-batch; a longer sequence gets its own.
    """

    def work_of(members: Bin) -> float:
        return float(work[members].sum())

    plans = [share_then_pack(lengths, work, ranks, max_tokens)]
    if len(lengths) < MANY * ranks:
        plans.append(pack_then_share(lengths, ranks, max_tokens))
    best = lightest(plans, work_of)
    # Heaviest first on every rank: micro-batches that meet in the collectives of experts are alike.
    return [sorted(bins, key=work_of, reverse=True) for bins in best]


def lightest(plans: Sequence[Ranks], work_of: Callable[[Bin], float]) -> Ranks:
    """Choose the plan whose heaviest rank has the least work; of equal ones, that with the fewest micro-batches."""
    return min(plans, key=lambda plan: (max(sum(map(work_of, bins)) for bins in plan), max(map(len, plan))))


def share_then_pack(lengths: Sequence[int], work: Float64, ranks: int, max_tokens: int) -> Ranks:
    """Share out sequences by work; then each rank packs its own."""
    plan: Ranks = []
    shared = largest_differencing if len(work) < MANY * ranks else longest_first
    for share in exchanged(shared(work, ranks), work):
        own = [lengths[index] for index in share]
        plan.append([[share[i] for i in members] for members in pack(own, max_tokens)])
    count = max(map(len, plan))
    return [split_to(bins, lengths, count) for bins in plan]


def pack_then_share(lengths: Sequence[int], ranks: int, max_tokens: int) -> Ranks:
    """Pack all sequences, then deal out equally many micro-batches to each rank.

    In rounds of one per rank, most tokens first, the largest of a round goes to the rank with the fewest tokens.
    """
    bins = pack(lengths, max_tokens)
    bins = split_to(bins, lengths, -(-len(bins) // ranks) * ranks)
    sizes = {id(members): sum(lengths[i] for i in members) for members in bins}
    bins.sort(key=lambda members: -sizes[id(members)])
    plan: Ranks = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(bins), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: totals[rank])
        for rank, members in zip(lightest_first, bins[start : start + ranks], strict=False):
            plan[rank].append(members)
            totals[rank] += sizes[id(members)]
    return plan


def longest_first(work: Float64, parts: int) -> list[list[int]]:
    """Indices in ``parts`` lists: the most work first, each to the list with the least so far. A list may be empty.

    Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): sums differ by the work of one sequence at most.

    >>> longest_first(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    [[0, 3, 4], [1, 2]]
    """
    result: list[list[int]] = [[] for _ in range(parts)]
    totals = [(0.0, part) for part in range(parts)]  # a heap: the lightest part first
    order = np.argsort(-work, kind="stable")
    for index, added in zip(order.tolist(), work[order].tolist(), strict=True):
        total, part = totals[0]
        result[part].append(index)
        heapq.heapreplace(totals, (total + added, part))
    return result


def largest_differencing(work: Float64, parts: int) -> list[list[int]]:
    """Indices in ``parts`` lists whose sums of ``work`` differ little; a list may be empty.

    Karmarkar & Karp, "The Differencing Method of Set Partitioning" (1982), for several parts: the two partial
    partitions whose parts differ most are united, the heaviest part of one with the lightest of the other. O(n log n)
    unions of O(parts log parts).

    >>> largest_differencing(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    [[1, 3, 4], [0, 2]]
    """
    count = len(work)
    if parts == 1:
        return [list(range(count))]
    single = np.zeros(parts)
    sums: dict[int, Float64] = {}
    # Union u takes part p from part order[p] of the first and parts - 1 - order[p] of the second.
    unions: dict[int, tuple[int, int, npt.NDArray[np.intp]]] = {}
    queue: list[tuple[float, int]] = []
    for index in range(count):
        sums[index] = single.copy()
        sums[index][0] = work[index]
        queue.append((-float(work[index]), index))
    heapq.heapify(queue)
    for number in range(count, 2 * count - 1):
        first, second = heapq.heappop(queue)[1], heapq.heappop(queue)[1]
        united = sums.pop(first) + sums.pop(second)[::-1]
        order = np.argsort(-united, kind="stable")
        sums[number] = united[order]
        unions[number] = first, second, order
        heapq.heappush(queue, (float(sums[number][-1] - sums[number][0]), number))
    return _unroll(unions, count, parts)


def exchanged(parts: list[list[int]], work: Float64) -> list[list[int]]:
    """Move and swap single sequences as long as that makes the heaviest part lighter."""
    parts = [list(part) for part in parts]
    sums = np.array([work[part].sum() for part in parts])
    while sums.max() > GOOD_ENOUGH * sums.mean():
        heaviest = int(sums.argmax())
        found = [_best_exchange(parts, work, sums, heaviest, other) for other in range(len(parts)) if other != heaviest]
        heavier, other, given, taken = min(found, key=lambda exchange: exchange[:2])
        if heavier >= sums[heaviest] * (1 - 1e-9):  # rounding must not go in circles
            break
        back = [parts[other].pop(taken)] if taken < len(parts[other]) else []
        parts[other].append(parts[heaviest].pop(given))
        parts[heaviest] += back
        for part in (heaviest, other):
            sums[part] = work[parts[part]].sum()
    return [sorted(part) for part in parts]


def _best_exchange(
    parts: list[list[int]], work: Float64, sums: Float64, heaviest: int, other: int
) -> tuple[float, int, int, int]:
    """(heavier of both parts afterwards, other part, position given, position taken or else the part's length)."""
    taken = np.append(work[parts[other]], 0.0)
    difference = work[parts[heaviest]][:, None] - taken[None, :]
    heavier = np.maximum(sums[heaviest] - difference, sums[other] + difference)
    row, column = np.unravel_index(int(heavier.argmin()), heavier.shape)
    return float(heavier[row, column]), other, int(row), int(column)


def _unroll(unions: dict[int, tuple[int, int, npt.NDArray[np.intp]]], count: int, parts: int) -> list[list[int]]:
    """The sequences in each part of the last union."""
    result: list[list[int]] = [[] for _ in range(parts)]
    left = [(2 * count - 2, np.arange(parts))] if count else []  # (union or sequence, where its parts go)
    while left:
        number, goes_to = left.pop()
        if number < count:
            result[goes_to[0]].append(number)
            continue
        first, second, order = unions[number]
        of_first = np.empty(parts, dtype=np.intp)
        of_first[order] = goes_to
        left += [(first, of_first), (second, of_first[::-1])]
    return [sorted(part) for part in result]


def pack(lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Assign every index of ``lengths`` to one of few bins of at most ``max_tokens``; a longer sequence has its own.

    Best fit decreasing: longest first, each into the fullest bin that still takes it, at most 11/9 of the
    optimal number of bins plus a constant (Johnson et al. 1974), in O(n log n) comparisons. Equal lengths
    keep their order, so the result depends on nothing else.

    >>> pack([5, 3, 4, 2, 8], 7)
    [[4], [0, 3], [2, 1]]
    """
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # sorted (tokens left, bin)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = bisect_left(room, (lengths[index], 0))
        if fit < len(room):
            left, number = room.pop(fit)
            bins[number].append(index)
        else:
            left, number = max_tokens, len(bins)
            bins.append([index])
        insort(room, (left - lengths[index], number))
    return bins


def split_to(bins: list[Bin], lengths: Sequence[int], count: int) -> list[Bin]:
    """Halve the largest bins that hold several sequences until there are ``count``, or no more sequences to part."""
    queue = [(-sum(lengths[i] for i in members), number, members) for number, members in enumerate(bins)]
    heapq.heapify(queue)
    done: list[Bin] = []
    made = len(queue)
    while queue and len(queue) + len(done) < count:
        _, _, members = heapq.heappop(queue)
        if len(members) == 1:
            done.append(members)
            continue
        for half in longest_first(np.array([float(lengths[i]) for i in members]), 2):
            chosen = [members[i] for i in half]
            heapq.heappush(queue, (-sum(lengths[i] for i in chosen), made, chosen))
            made += 1
    return done + [members for _, _, members in sorted(queue)]
