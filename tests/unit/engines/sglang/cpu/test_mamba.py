"""Kernels of Mamba-2 and experts without a gate on an engine's CPU, against the recurrence and plain products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from miles_async.engines.sglang.cpu import mamba
from tests.fakes.mamba import recurrence
from tests.unit.engines.sglang.cpu.test_gated_delta import ENDS, IN_SLOTS, LENGTHS, SLOTS, TOKENS, drawn

HEADS, SIZE, GROUPS, STATE = 4, 6, 2, 8
X, DT = drawn(TOKENS, HEADS, SIZE, seed=1), drawn(TOKENS, HEADS, seed=2)
B, C = drawn(TOKENS, GROUPS, STATE, seed=3), drawn(TOKENS, GROUPS, STATE, seed=4)
DECAY, SKIP, DT_BIAS = -drawn(HEADS, seed=5).exp(), drawn(HEADS, seed=6), drawn(HEADS, seed=7)
BEFORE = drawn(SLOTS, HEADS, SIZE, STATE, seed=8)


def exact(tokens: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the recurrence reads, and its last state."""
    key, query = (part[tokens].double().repeat_interleave(HEADS // GROUPS, 1) for part in (B, C))
    step = softplus(DT[tokens].double() + DT_BIAS.double())
    before = None if state is None else state.double()
    return recurrence(X[tokens].double(), step, DECAY.double(), key, query, SKIP.double(), before)


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("continued", [True, False])
def test_new_tokens_of_requests_are_read_after_their_states(
    chunk: int, continued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba, "CHUNK", chunk)
    out, before = torch.empty(1, TOKENS, HEADS, SIZE), BEFORE[: len(LENGTHS)].clone()
    between, states, tracked = mamba.chunk_scan(
        X[None],
        DT[None],
        DECAY,
        B[None],
        C[None],
        chunk_size=128,
        D=SKIP,
        dt_bias=DT_BIAS,
        cu_seqlens=ENDS,
        initial_states=before if continued else None,
        out=out,
        state_dtype=torch.float32,
        dt_softplus=True,
    )
    assert between is tracked is None
    for request, (start, end) in enumerate(zip(ENDS[:-1].tolist(), ENDS[1:].tolist(), strict=True)):
        read, last = exact(slice(start, end), BEFORE[request] if continued else None)
        torch.testing.assert_close(out[0, start:end].double(), read, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[request].double(), last, rtol=1e-5, atol=1e-5)


def test_a_token_of_each_request_is_read_after_its_state() -> None:
    states, requests = BEFORE.clone(), len(IN_SLOTS)
    out = torch.empty(requests, HEADS, SIZE)
    mamba.state_update(
        states,
        X[:requests],
        DT[:requests, :, None].expand(-1, -1, SIZE),
        DECAY[:, None, None].expand(-1, SIZE, STATE),
        B[:requests],
        C[:requests],
        SKIP[:, None].expand(-1, SIZE),
        z=None,
        dt_bias=DT_BIAS[:, None].expand(-1, SIZE),
        dt_softplus=True,
        state_batch_indices=IN_SLOTS,
        out=out,
    )
    for request, slot in enumerate(IN_SLOTS.tolist()):
        read, last = exact(slice(request, request + 1), BEFORE[slot])
        torch.testing.assert_close(out[request].double(), read[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[slot].double(), last, rtol=1e-5, atol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in IN_SLOTS.tolist()]
    assert torch.equal(states[others], BEFORE[others])


def test_experts_without_a_gate() -> None:
    x, up, down = drawn(5, 6, seed=1), drawn(3, 8, 6, seed=2), drawn(3, 6, 8, seed=3)
    weights, chosen = drawn(5, 2, seed=4), torch.tensor([[0, 2], [1, 0], [2, 0], [0, 1], [2, 1]])
    each = torch.einsum("ehf,etf->teh", down, torch.einsum("efh,th->etf", up, x).relu().square())
    expected = sum(weights[:, k, None] * each[torch.arange(5), chosen[:, k]] for k in range(2))
    torch.testing.assert_close(mamba.squared_relu_experts(x, up, down, weights, chosen), expected, rtol=1e-5, atol=1e-4)
