"""Buckets of exported weights: nothing lost, order kept, sizes bounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_async.weights.export import into_buckets


def named(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [(f"layers.{i}.linear.weight", torch.full((size,), float(i))) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 120))
def test_buckets_keep_every_tensor_in_order_within_the_bound(sizes: list[int], max_bytes: int) -> None:
    tensors = named(sizes)
    buckets = list(into_buckets(tensors, max_bytes))
    sent = [item for bucket in buckets for item in bucket.items()]
    assert [name for name, _ in sent] == [name for name, _ in tensors]
    assert all(a is b for (_, a), (_, b) in zip(sent, tensors, strict=True))
    for bucket in buckets:
        assert bucket
        assert sum(tensor.nbytes for tensor in bucket.values()) <= max_bytes or len(bucket) == 1


def test_buckets_are_filled_before_a_new_one_is_begun() -> None:
    buckets = list(into_buckets(named([2, 2, 3, 1, 9, 1]), 4 * 4))
    assert [[tensor.numel() for tensor in bucket.values()] for bucket in buckets] == [[2, 2], [3, 1], [9], [1]]


def test_a_module_is_never_split() -> None:
    names = [
        "0.norm.weight",
        "0.attention.q_a_proj.weight",
        "0.attention.q_a_norm.weight",
        "0.attention.kv_a_proj.weight",
    ]
    tensors = [(f"layers.{name}", torch.zeros(4)) for name in [*names, "1.norm.weight"]]
    buckets = [[name.split(".")[-2] for name in bucket] for bucket in into_buckets(tensors, 3 * 16)]
    assert buckets == [["norm"], ["q_a_proj", "q_a_norm", "kv_a_proj"], ["norm"]]


def test_a_bucket_needs_room() -> None:
    with pytest.raises(ValueError, match="--update-weight-buffer-size"):
        list(into_buckets(named([1]), 0))
