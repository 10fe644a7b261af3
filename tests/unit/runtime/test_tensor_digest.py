"""A digest of every element and its place, alike for the whole tensor and for any way to cut it up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.engines.sglang import region_digest
from miles_async.engines.sglang.region_digest import Region, block_digests, region_digests, torch_block_digests
from miles_async.runtime.tensor_digest import digest, row_multipliers, total, word_multipliers

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def whole(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return digest(raw, tensor.itemsize, tensor.shape)


def held(memory: torch.Tensor, offset: int, strides: tuple[int, ...], row: int) -> str:
    return region_digests([Region(memory, offset, strides, row)])[0]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def piece(tensor: torch.Tensor, view: torch.Tensor) -> str:
    """Digest of a view of ``tensor``, copied to memory of its own."""
    row = tensor.shape[-1] if tensor.ndim else 1
    offset = view.storage_offset() - tensor.storage_offset()
    return held(view.clone(), offset, view.stride(), row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 0), (7,), (300, 200), (3, 70_001), (5, 3, 8), (3, 5, 7), (9, 1)])
def test_both_ends_agree_on_whole_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_tensor(*shape, dtype=dtype)
    assert piece(tensor, tensor) == whole(tensor)


@given(st.data())
def test_pieces_add_up(data: st.DataObject) -> None:
    # covers: C8
    shape = [*data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)), data.draw(st.integers(1, 200))]
    tensor = random_tensor(*shape, dtype=data.draw(st.sampled_from(DTYPES)))
    dimension = data.draw(st.integers(0, tensor.ndim - 1))
    cuts = data.draw(st.lists(st.integers(0, tensor.shape[dimension]), max_size=4))
    bounds = [0, *sorted(cuts), tensor.shape[dimension]]
    order = data.draw(st.permutations(range(tensor.ndim)))  # some loaders transpose
    pieces = [tensor.narrow(dimension, start, end - start).permute(order) for start, end in pairwise(bounds)]
    assert total(piece(tensor, part) for part in pieces) == whole(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: [tensor.view(-1)[:160], tensor.view(-1)[160:]],  # whole rows, flattened
        lambda tensor: [tensor.view(-1)[:77], tensor.view(-1)[77:]],
        lambda tensor: [tensor[::2], tensor[1::2]],
        lambda tensor: [tensor[:, ::2], tensor[:, 1::2]],
        lambda tensor: [tensor.view(2, 3, 4, 16)[:, i] for i in range(3)],  # heads of several groups
        lambda tensor: [tensor.view(24, 2, 8)[:, i] for i in range(2)],
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_that_loaders_make_add_up(view: object, dtype: torch.dtype) -> None:
    tensor = random_tensor(24, 16, dtype=dtype)
    assert total(piece(tensor, part) for part in view(tensor)) == whole(tensor)  # type: ignore[operator]


def test_memory_may_lie_anyhow() -> None:
    """As a part of a fused parameter, or with a gap behind every row."""
    tensor = random_tensor(6, 12, dtype=torch.bfloat16)
    fused = torch.zeros(20, 17, dtype=torch.bfloat16)
    fused[3:9, 2:14] = tensor
    assert held(fused[3:9, 2:14], 0, (12, 1), 12) == held(tensor.t().contiguous(), 0, (1, 12), 12) == whole(tensor)


def test_torch_and_numpy_compute_the_same() -> None:
    words = torch.randint(-(2**62), 2**62, (3, 300, 77))
    tables = torch.from_numpy(row_multipliers(5, 300)), torch.from_numpy(word_multipliers(9, 77))
    assert torch.equal(block_digests(words, *tables), torch_block_digests(words, *tables))


@given(st.data())
def test_regions_that_are_alike_are_read_together(data: st.DataObject) -> None:
    """As experts of a layer on a GPU, with the digests that each has alone."""
    # covers: C8
    shape = [*data.draw(st.lists(st.integers(1, 6), max_size=2)), data.draw(st.integers(1, 40))]
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=6))
    order = data.draw(st.permutations(range(len(shape))))
    starts = {0, data.draw(st.integers(0, shape[-1] - 1))}
    parts = [
        (random_tensor(*shape, dtype=dtype, seed=seed)[..., start:].permute(order), start)
        for seed, dtype in enumerate(dtypes)
        for start in starts
    ]
    regions = [Region(part, start, part.stride(), shape[-1]) for part, start in parts]
    alone = region_digests(regions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_digest, "_regions_at_once", lambda _: data.draw(st.integers(2, 4)))
        assert region_digests(regions) == alone


VIEWS = {"aten::unsqueeze", "aten::as_strided", "aten::view", "aten::detach", "detach"}  # which launch nothing


def test_experts_take_no_more_operations_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_digest, "_regions_at_once", lambda _: 128)
    monkeypatch.setattr(region_digest, "block_digests", torch_block_digests)

    def operations(experts: int) -> int:
        regions = [Region(torch.ones(8, 64), 0, (64, 1), 64) for _ in range(experts)]
        with torch.profiler.profile() as profile:
            region_digests(regions)
        return sum(event.count for event in profile.key_averages() if event.key not in VIEWS)

    assert operations(128) < operations(1) + 8  # they are stacked


@given(st.sampled_from(DTYPES[:4]), st.integers(0, 24 * 24 - 1), st.integers(0, 63))
def test_one_bit_anywhere_changes_it(dtype: torch.dtype, place: int, bit: int) -> None:
    # covers: C8
    tensor = random_tensor(24, 24, dtype=dtype)
    wrong = tensor.clone()
    wrong.view(-1).view(torch.uint8)[place * tensor.itemsize + bit // 8 % tensor.itemsize] ^= 1 << bit % 8
    assert whole(wrong) != whole(tensor)


@settings(max_examples=500)
@given(st.data())
def test_two_elements_that_change_places_change_it(data: st.DataObject) -> None:
    # covers: C8
    tensor = random_tensor(24, 24, dtype=data.draw(st.sampled_from(DTYPES[:4])))
    first, second = data.draw(st.tuples(*[st.integers(0, 24 * 24 - 1)] * 2))
    wrong = tensor.clone().view(-1)
    wrong[[first, second]] = wrong[[second, first]]
    bits = INTEGERS[tensor.itemsize]
    same = bool((wrong.view(bits) == tensor.view(-1).view(bits)).all())
    assert (whole(wrong.view(24, 24)) == whole(tensor)) == same


def test_signs_in_the_upper_ends_of_words_that_changed_places_change_it() -> None:
    """Of a word times an odd number these bits are in the uppermost bit alone, where any two of them cancel out."""
    # covers: C8
    tensor = torch.ones(4, 8, dtype=torch.bfloat16)
    tensor[0, 3] = -1
    others = [torch.ones(4, 8, dtype=torch.bfloat16) for _ in range(7)]
    for number, other in enumerate(others, start=1):
        other[number // 2, 3 + 4 * (number % 2)] = -1
    assert len({whole(found) for found in [tensor, *others]}) == 8


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_places_count(dtype: torch.dtype) -> None:
    # covers: C8
    tensor = random_tensor(304, 304, dtype=dtype)
    swapped, columns, block = tensor.clone(), tensor.clone(), tensor.clone()
    swapped[[0, 299]] = swapped[[299, 0]]
    columns[:, [0, 299]] = columns[:, [299, 0]]
    block[:152, :152], block[152:, 152:] = tensor[152:, 152:], tensor[:152, :152]
    shifted = [tensor.roll(1, 0), tensor.roll(1, 1), tensor.view(-1).roll(1).view_as(tensor)]
    halves = [tensor.roll(152, 0), tensor.roll(152, 1)]  # shards of two ranks, the wrong way round
    wrong = [tensor.t(), swapped, columns, block, tensor.flip(1), tensor.flip(0), *shifted, *halves]
    assert len({whole(found) for found in [tensor, *wrong]}) == 1 + len(wrong)
