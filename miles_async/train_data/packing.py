"""Sequences into bins: micro-batches of at most ``--max-tokens-per-gpu`` tokens, or of one longer sequence."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

Bin = list[int]  # indices of samples


def pack(lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Every index of ``lengths`` in exactly one bin of at most ``max_tokens``; few bins. A longer one has its own.

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
    """At least ``len(bins)`` bins made ``count`` by halving the largest that hold several samples.

    Fewer than ``count`` come back only if there are not that many samples.
    """
    queue = [(-sum(lengths[i] for i in members), number, members) for number, members in enumerate(bins)]
    heapq.heapify(queue)
    done: list[Bin] = []
    made = len(queue)
    while queue and len(queue) + len(done) < count:
        _, _, members = heapq.heappop(queue)
        if len(members) == 1:
            done.append(members)
            continue
        for half in _halve(members, lengths):
            heapq.heappush(queue, (-sum(lengths[i] for i in half), made, half))
            made += 1
    return done + [members for _, _, members in sorted(queue)]


def _halve(members: Bin, lengths: Sequence[int]) -> tuple[Bin, Bin]:
    """Two non-empty bins of similar size: longest first, each to the lighter side."""
    halves: tuple[Bin, Bin] = ([], [])
    totals = [0, 0]
    for index in sorted(members, key=lambda i: -lengths[i]):
        lighter = 0 if totals[0] <= totals[1] else 1
        halves[lighter].append(index)
        totals[lighter] += lengths[index]
    return halves
