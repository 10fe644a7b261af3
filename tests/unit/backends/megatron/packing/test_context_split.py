"""Packed sequences split over context-parallel ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_async.backends.megatron.packing.context_split import gathered_order, positions_of_rank

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
