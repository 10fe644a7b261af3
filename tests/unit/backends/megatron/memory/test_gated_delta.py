"""What the stand-ins for flash-linear-attention's kernels allocate."""

from __future__ import annotations

import pytest
import torch

from miles_async.backends.megatron.memory import kernels
from miles_async.backends.megatron.memory.live_bytes import LiveBytes

TOKENS, HEADS, KEY, VALUE = 256, 4, 32, 48
BF16, FP32 = 2, 4


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(1, TOKENS, HEADS, *shape, dtype=dtype, requires_grad=True)

    return [tensor(KEY), tensor(KEY), tensor(VALUE), tensor(dtype=torch.float32), tensor()]


def test_the_rule_keeps_decays_and_one_inverse_per_chunk(inputs: list[torch.Tensor]) -> None:
    query, key, value, g, beta = inputs
    with LiveBytes(but=inputs) as live:
        out, _ = kernels.delta_rule(query, key, value, g=g, beta=beta)
        assert out.shape == value.shape
        per_token = HEADS * (VALUE * BF16 + FP32 + kernels.CHUNK * BF16)  # output, sums of decays, inverses
        assert live.now == TOKENS * per_token
        states = TOKENS // kernels.CHUNK * HEADS * KEY * VALUE * BF16
        assert live.most >= live.now + states
        kept = live.now
        out.sum().backward()
    again = states + TOKENS * HEADS * (KEY + 2 * VALUE) * BF16
    assert live.most >= kept + again + states  # states' gradients, too
    assert [each.grad.shape for each in inputs if each.grad is not None] == [each.shape for each in inputs]


def test_the_convolution_keeps_its_output_alone() -> None:
    x = torch.zeros(1, TOKENS, HEADS * KEY, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(HEADS * KEY, 4, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes(but=[x, weight]) as live:
        out, _ = kernels.convolution(x=x, weight=weight, activation="silu")
        assert live.now == out.nbytes == x.nbytes
        out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
