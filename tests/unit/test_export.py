"""Buckets of exported weights: nothing lost, order kept, sizes bounded, copies independent of the trainer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_async.types import TensorMeta
from miles_async.weights.export import into_buckets, stage_on_host


def named(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{i}", torch.full((size,), float(i))) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 120))
def test_buckets_keep_every_tensor_in_order_within_the_bound(sizes: list[int], max_bytes: int) -> None:
    tensors = named(sizes)
    buckets = list(into_buckets(tensors, max_bytes))
    sent = [(meta.name, tensor) for b in buckets for meta, tensor in zip(b.metas, b.tensors, strict=True)]
    assert [name for name, _ in sent] == [name for name, _ in tensors]
    assert all(a is b for (_, a), (_, b) in zip(sent, tensors, strict=True))
    for bucket in buckets:
        assert bucket.tensors
        assert bucket.num_bytes <= max_bytes or len(bucket.tensors) == 1


def test_buckets_are_filled_before_a_new_one_is_begun() -> None:
    buckets = list(into_buckets(named([2, 2, 3, 1, 9, 1]), 4 * 4))
    assert [[tensor.numel() for tensor in bucket.tensors] for bucket in buckets] == [[2, 2], [3, 1], [9], [1]]


def test_metas_describe_tensors_as_engines_expect() -> None:
    tensors = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16)), ("c", torch.zeros(()))]
    [bucket] = into_buckets(tensors, 1000)
    assert bucket.metas == (
        TensorMeta("a", "float32", (2, 3)),
        TensorMeta("b", "bfloat16", (4,)),
        TensorMeta("c", "float32", ()),
    )


def test_staged_copies_do_not_follow_the_trainer() -> None:
    """Otherwise an optimizer step during publication would send half of the next version."""
    weight = torch.arange(6.0).reshape(2, 3)
    [bucket] = stage_on_host([("plain", weight), ("transposed", weight.t())], 1000)
    weight.zero_()
    assert bucket.tensors[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert bucket.tensors[1].flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert all(tensor.is_contiguous() for tensor in bucket.tensors)  # gloo ignores strides


def test_a_bucket_needs_room() -> None:
    with pytest.raises(ValueError, match="--update-weight-buffer-size"):
        list(into_buckets(named([1]), 0))
