"""Buckets of exported weights: nothing lost, order kept, sizes bounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_async.weights.staging import into_buckets, share


def named(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [(f"layers.{i}.linear.weight", torch.full((size,), float(i))) for i, size in enumerate(sizes)]


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), max_size=20), st.integers(1, 500))
def test_buckets_keep_every_tensor_in_order_within_the_bound(modules: list[list[int]], max_bytes: int) -> None:
    tensors = [
        (f"layers.{module}.linear{index}.weight", torch.randn(size))
        for module, sizes in enumerate(modules)
        for index, size in enumerate(sizes)
    ]
    sent = []
    for bucket in into_buckets(tensors, max_bytes):
        assert bucket
        of_modules = {name.split(".")[1] for name in bucket}
        assert sum(tensor.nbytes for tensor in bucket.values()) <= max_bytes or len(of_modules) == 1
        sent += [(name, tensor.tolist()) for name, tensor in bucket.items()]
    assert sent == [(name, tensor.tolist()) for name, tensor in tensors]


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
    buckets = into_buckets(tensors, 3 * 16)
    assert [[name.split(".")[-2] for name in bucket] for bucket in buckets] == [
        ["norm"],
        ["q_a_proj", "q_a_norm", "kv_a_proj"],
        ["norm"],
    ]


@given(st.lists(st.integers(1, 4), max_size=20), st.integers(1, 5))
def test_every_tensor_is_in_the_share_of_one_sender(sizes: list[int], senders: int) -> None:
    """With all others of its module, in their order; no sender has more than one module more than another."""
    names = [f"{module}.linear{i}.weight" for module, size in enumerate(sizes) for i in range(size)]
    tensors = [(name, torch.zeros(1)) for name in names]
    shares = [[name for name, _ in share(tensors, sender, senders)] for sender in range(senders)]
    assert sorted(name for of_one in shares for name in of_one) == sorted(names)
    modules = [list(dict.fromkeys(name.split(".")[0] for name in of_one)) for of_one in shares]
    assert len({module for of_one in modules for module in of_one}) == sum(map(len, modules)) == len(sizes)
    assert max(map(len, modules)) - min(map(len, modules)) <= 1
    assert all(sorted(of_one, key=names.index) == of_one for of_one in shares)


def test_a_share_takes_all_tensors() -> None:
    """Exporting is collective: who stopped early would leave the other ranks waiting."""
    tensors = iter(named([1, 1, 1]))
    assert len(list(share(tensors, 0, 3))) == 1
    assert list(tensors) == []


def test_a_bucket_needs_room() -> None:
    with pytest.raises(ValueError, match="--update-weight-buffer-size"):
        list(into_buckets(named([1]), 0))
