"""The recurrence of Mamba-2, token by token in the inputs' dtype (arXiv:2405.21060)."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    value: Tensor, step: Tensor, decay: Tensor, key: Tensor, query: Tensor, skip: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One sequence: value [n, h, P], step [n, h], decay [h], key and query [n, h, N], skip [h], state [h, P, N] → what
    is read, [n, h, P], and the last state.
    """
    state = value.new_zeros(*value.shape[1:], key.shape[2]) if state is None else state
    read = []
    for v, d, b, c in zip(value, step, key, query, strict=True):
        state = (d * decay).exp()[:, None, None] * state + torch.einsum("h,hp,hn->hpn", d, v, b)
        read.append(torch.einsum("hpn,hn->hp", state, c) + skip[:, None] * v)
    return torch.stack(read), state
