"""A digest of every element and its place, alike for the whole tensor and for any way to cut it up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.engines.held_weights import region_digest
from miles_async.tensor_digest import BLOCK, digest, total

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]


def whole(tensor: torch.Tensor) -> str:
    return digest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.itemsize)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def piece(tensor: torch.Tensor, view: torch.Tensor) -> str:
    """Of a view of ``tensor``, in memory of its own."""
    return region_digest(view.clone(), view.storage_offset() - tensor.storage_offset(), view.stride())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300, 200), (3, BLOCK + 1)])
def test_both_ends_agree_on_whole_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_tensor(*shape, dtype=dtype)
    assert piece(tensor, tensor) == whole(tensor)


@settings(deadline=None)
@given(st.data())
def test_pieces_add_up(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 2000))
    tensor = random_tensor(rows, columns, dtype=data.draw(st.sampled_from(DTYPES)))
    dimension = data.draw(st.integers(0, 1))
    cuts = data.draw(st.lists(st.integers(0, tensor.shape[dimension]), max_size=4))
    bounds = [0, *sorted(cuts), tensor.shape[dimension]]
    pieces = [tensor.narrow(dimension, start, end - start) for start, end in pairwise(bounds)]
    assert total(piece(tensor, part) for part in pieces) == whole(tensor)


@settings(deadline=None)
@given(st.integers(0, 3 * BLOCK - 1), st.integers(0, 31))
def test_one_bit_anywhere_changes_it(place: int, bit: int) -> None:
    tensor = random_tensor(3, BLOCK)
    wrong = tensor.clone()
    wrong.view(torch.int32).view(-1)[place] ^= torch.tensor(1 << bit).to(torch.int32)
    assert whole(wrong) != whole(tensor)


def test_places_count() -> None:
    tensor = random_tensor(300, 300)
    swapped = tensor.clone()
    swapped[[0, 299]] = swapped[[299, 0]]
    assert len({whole(tensor), whole(tensor.t()), whole(swapped), whole(tensor.flip(1))}) == 4
    assert whole(tensor.reshape(100, 900)) == whole(tensor), "a shape is compared by itself"
