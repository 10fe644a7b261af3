"""A layer with a frozen weight makes one product of matrices, forward and backward, however its input is strided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.rank_processes import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def multiply(rank: int, world_size: int, store: dist.Store) -> list[tuple[list[str], Any, Any]]:
    """(Products, output, gradient of the input), as it is and patched; in a process that has imported Megatron."""
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight
    from torch.utils._python_dispatch import TorchDispatchMode

    from miles_async.backends.megatron.adapters.attach import flatten_frozen_products

    products: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (name := function.overloadpacket.__name__) in ("mm", "bmm", "addmm", "mv"):
                products.append(name)
            return function(*args, **(kwargs or {}))

    def observe() -> tuple[list[str], object, object]:
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(6, 4, generator=draw)
        input = torch.randn(1, 5, 4, generator=draw).transpose(0, 1).requires_grad_()
        gradient = torch.randn(1, 5, 6, generator=draw).transpose(0, 1)
        products.clear()
        with Noted():
            output = LinearWithFrozenWeight.apply(input, weight, None, False, None)
            output.backward(gradient)
        assert input.grad is not None
        return list(products), output.detach().numpy(), input.grad.numpy()

    before = observe()
    flatten_frozen_products()
    return [before, observe()]


def test_products_are_of_matrices_and_no_longer_of_vectors() -> None:
    (before, *expected), (after, *found) = run_ranks(1, multiply)[0]
    assert before == ["bmm", "mm"]  # else the patch can go
    assert after == ["mm", "mm"]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
