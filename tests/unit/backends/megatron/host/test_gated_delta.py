"""Linear attention of packed sequences: each sequence's own recurrence and convolution, with their gradients."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor

from miles_async.backends.megatron.host.gated_delta import causal_conv1d, l2norm
from tests.fakes.gated_delta import convolution, recurrence

ENDS = [0, 1, 4, 4, 69, 74, 209]  # sequences of one token, of none, and of several chunks
HEADS, KEY, VALUE, TAPS = 3, 4, 6, 4


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def compare(
    found: Tensor,
    expected: Tensor,
    inputs: list[Tensor],
    exact: list[Tensor],
    *,
    rtol: float = 0.0,
    atol: float = 3e-6,
    of_gradients: float = 3e-6,
) -> None:
    """Values, and gradients of a weighted sum. ``exact``: the inputs in float64."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), exact)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine.double(), reference, rtol=0, atol=of_gradients * max(1, float(reference.abs().max()))
        )


@pytest.mark.parametrize("packed", [True, False])
def test_recurrence_is_each_sequences_own(packed: bool) -> None:
    ends = ENDS if packed else [0, ENDS[-1]]
    inputs = [drawn(ends[-1], HEADS, size, seed=size) for size in (KEY, KEY + 1, VALUE, 2, 3)]
    inputs = [each[..., :KEY] for each in inputs[:2]] + [inputs[2], *(each[..., 0] for each in inputs[3:])]
    inputs = [each.detach().requires_grad_() for each in inputs]
    exact = [each.detach().double().requires_grad_() for each in inputs]

    def gates(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> list[Tensor]:
        lengths = [each / each.norm(dim=-1, keepdim=True) for each in (query, key)]
        return [*lengths, value, -torch.nn.functional.softplus(decay), beta.sigmoid()]

    query, key, value, decay, beta = (each[None] for each in gates(*inputs))
    found, state = gdn.chunk_gated_delta_rule(
        query, key, value, g=decay, beta=beta, cu_seqlens=torch.tensor(ends).int() if packed else None
    )
    assert state is None
    parts = gates(*exact)
    expected = torch.cat(
        [recurrence(*(part[start:end] for part in parts))[0] for start, end in pairwise(ends) if end > start]
    )
    compare(found[0], expected, inputs, exact)


@pytest.mark.parametrize("packed", [True, False])
def test_convolution_is_each_sequences_own(packed: bool) -> None:
    ends = ENDS if packed else [0, ENDS[-1]]
    inputs = [drawn(ends[-1], 5, seed=1), drawn(5, TAPS, seed=2)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, _ = causal_conv1d(
        inputs[0][None], inputs[1], activation="silu", cu_seqlens=torch.tensor(ends).int() if packed else None
    )
    expected = torch.cat([convolution(exact[0][start:end], exact[1]) for start, end in pairwise(ends) if end > start])
    compare(found[0], expected, inputs, exact)


def test_convolution_without_activation_and_with_bias() -> None:
    x, bias = drawn(1, 2, 3, seed=1), drawn(3, seed=2)
    weight = torch.zeros(3, TAPS)
    weight[:, -1] = 2.0
    torch.testing.assert_close(causal_conv1d(x, weight, bias)[0], 2 * x + bias)


def test_lengths_are_one_in_the_inputs_dtype() -> None:
    x = drawn(2, 3, 4, seed=1).bfloat16()
    assert l2norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(l2norm(x).float().norm(dim=-1), torch.ones(2, 3), rtol=0, atol=1e-2)


@pytest.mark.parametrize("module", [common, gdn])
def test_megatron_calls_the_stand_ins(module: ModuleType) -> None:
    """Its own fallback refuses packed sequences; without flash-linear-attention, it has no convolution."""
    assert module.causal_conv1d is causal_conv1d
    with pytest.raises(AssertionError, match="cu_seqlens is not supported"):
        common.torch_chunk_gated_delta_rule(*[torch.zeros(1, 1, 1, 1)] * 3, *[torch.zeros(1, 1, 1)] * 2, cu_seqlens=1)
