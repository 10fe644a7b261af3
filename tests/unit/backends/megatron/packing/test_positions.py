"""Positions of tokens in packed sequences: split over context-parallel ranks, or shared by samples that begin alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_async.backends.megatron.packing.positions import (
    SharedPlaces,
    gathered_order,
    positions_of_rank,
    share_places,
)

SIZES = st.integers(1, 5)
CHUNKS = st.lists(st.integers(0, 6), min_size=1, max_size=6)  # tokens of a chunk of each sequence


def boundaries_of(chunks: list[int], size: int) -> np.ndarray:
    return np.cumsum([0, *(2 * size * chunk for chunk in chunks)])


def test_a_rank_gets_a_chunk_from_the_front_and_its_mirror_image() -> None:
    parts = [positions_of_rank(([0, 12]), 3, rank).tolist() for rank in range(3)]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@given(SIZES, CHUNKS)
def test_every_position_is_on_one_rank_and_found_again(size: int, chunks: list[int]) -> None:
    boundaries = boundaries_of(chunks, size)
    held = np.concatenate([positions_of_rank(boundaries, size, rank) for rank in range(size)])
    assert held[gathered_order(boundaries, size)].tolist() == list(range(int(boundaries[-1])))


@given(SIZES, CHUNKS)
def test_ranks_have_equal_parts_of_every_sequence_and_equal_work(size: int, chunks: list[int]) -> None:
    boundaries = boundaries_of(chunks, size)
    starts = boundaries[:-1].tolist()
    for rank in range(size):
        held = positions_of_rank(boundaries, size, rank)
        for start, chunk in zip(starts, chunks, strict=True):
            own = held[(held >= start) & (held < start + 2 * size * chunk)] - start
            assert len(own) == 2 * chunk
            # The distances to the two ends of the sequence are shared out alike: causal attention's work is the same.
            assert int(own.sum()) == chunk * (2 * size * chunk - 1)


def test_one_rank_has_everything_as_it_is() -> None:
    boundaries = [0, 2, 2, 8]
    assert positions_of_rank(boundaries, 1, 0).tolist() == list(range(8))
    odd = [0, 3, 4]  # without context parallelism nothing is padded
    assert positions_of_rank(odd, 1, 0).tolist() == list(range(4))


def places_of(samples: Sequence[Sequence[int]]) -> SharedPlaces:
    tokens = np.array([token for sample in samples for token in sample], dtype=np.int64)
    return share_places(tokens, np.cumsum([0, *map(len, samples)]))


def test_samples_share_what_they_begin_with_and_leave_out_their_last_token() -> None:
    shared = places_of([[5, 6, 1, 9], [5, 6, 2, 9], [5, 7, 1, 9], [5, 6, 1, 9], [5, 6, 1, 3, 9]])
    assert shared.places.tolist() == [0, 1, 2, 0, 1, 3, 0, 4, 5, 0, 1, 2, 0, 1, 2, 6]
    assert np.diff(shared.samples).tolist() == [3, 3, 3, 3, 4]
    assert shared.own.tolist() == [3, 1, 2, 0, 1]
    assert np.flatnonzero(~shared.read).tolist() == [3, 7, 11, 15, 20]


def test_equal_tokens_after_other_ones_are_not_shared() -> None:
    assert places_of([[1, 5, 5, 0], [2, 5, 5, 0]]).places.tolist() == [0, 1, 2, 3, 4, 5]


def test_samples_of_one_token_are_read_and_no_samples_have_no_places() -> None:
    assert places_of([[4], [4]]).places.tolist() == [0, 0]
    assert places_of([]).places.tolist() == []


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6)))
def test_every_position_is_one_prefix(samples: list[list[int]]) -> None:
    shared = places_of(samples)
    read = [sample[:-1] or sample for sample in samples]
    prefixes = [tuple(sample[: end + 1]) for sample in read for end in range(len(sample))]
    assert shared.places.max(initial=-1) + 1 == len(set(prefixes)) == shared.own.sum()
    assert len(set(zip(shared.places.tolist(), prefixes, strict=True))) == len(set(prefixes))
    ends = [shared.places[end - own : end] for end, own in zip(shared.samples[1:], shared.own, strict=True)]
    assert np.concatenate([*ends, []]).tolist() == list(range(len(set(prefixes))))
