"""A gated delta net's recurrence and its convolution, token by token in the inputs' dtype (arXiv:2412.06464)."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One sequence: [n, h, K] twice, [n, h, V], [n, h] twice, [h, V, K] → what is read, [n, h, V], and the last state.

    Queries and keys have length 1; ``decay`` is a logarithm.
    """
    state = value.new_zeros(*value.shape[1:], key.shape[2]) if state is None else state
    read = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        error = v - torch.einsum("hvk,hk->hv", state, k)
        state = state + torch.einsum("h,hv,hk->hvk", b, error, k)
        read.append(torch.einsum("hvk,hk->hv", state, q) * query.shape[2] ** -0.5)
    return torch.stack(read), state


def convolution(x: Tensor, weight: Tensor, before: Tensor | None = None) -> Tensor:
    """One sequence, [n, D], after ``before`` [taps - 1, D], with taps [D, taps], then silu: [n, D]."""
    taps = weight.shape[1]
    inputs = torch.cat([x.new_zeros(taps - 1, x.shape[1]) if before is None else before, x])
    out = torch.stack([(inputs[at : at + taps] * weight.T).sum(0) for at in range(len(x))])
    return out * out.sigmoid()
