"""Kernels of gated delta nets on an engine's CPU, against the recurrence token by token in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miles_async.engines.sglang.cpu import gated_delta
from tests.fakes.gated_delta import convolution, recurrence

KEY_HEADS, HEADS, KEY, VALUE, TAPS, SLOTS = 2, 4, 8, 6, 4, 9
LENGTHS = [1, 3, 70, 200, 2, 64]
IN_SLOTS = torch.tensor([3, 0, 8, 1, 5, 2], dtype=torch.int32)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TOKENS = sum(LENGTHS)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(query: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """Inputs of the recurrence in float64: [n, heads, ...]."""
    repeated = [(each.double() / each.double().norm(dim=-1, keepdim=True)) for each in (query, key)]
    decay = -A_LOG.double().exp() * torch.nn.functional.softplus(a.double() + DT_BIAS.double())
    heads = HEADS // KEY_HEADS
    return [*(each.repeat_interleave(heads, 1) for each in repeated), value.double(), decay, b.double().sigmoid()]


A_LOG, DT_BIAS = drawn(HEADS, seed=20), drawn(HEADS, seed=21)
PREFILL = [
    drawn(TOKENS, KEY_HEADS, KEY, seed=1),
    drawn(TOKENS, KEY_HEADS, KEY, seed=2),
    drawn(TOKENS, HEADS, VALUE, seed=3),
    drawn(TOKENS, HEADS, seed=4),
    drawn(TOKENS, HEADS, seed=5),
]


def read_all(states: Tensor) -> Tensor:
    """[TOKENS, heads, V]; ``states`` are changed."""
    query, key, value, a, b = PREFILL
    decay, beta = gated_delta.fused_gdn_gating(A_LOG, a, b, DT_BIAS)
    out, last, between = gated_delta.chunk_gated_delta_rule(
        query[None],
        key[None],
        value[None],
        g=decay,
        beta=beta,
        initial_state=states,
        initial_state_indices=IN_SLOTS,
        cu_seqlens=ENDS,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    assert last is between is None
    return out[0]


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_new_tokens_of_requests_are_read_after_their_states(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "CHUNK", chunk)
    before = drawn(SLOTS, HEADS, VALUE, KEY, seed=6)
    states = before.clone()
    out = read_all(states)
    for start, end, slot in zip(ENDS[:-1].tolist(), ENDS[1:].tolist(), IN_SLOTS.tolist(), strict=True):
        query, key, value, decay, beta = exact(*(part[start:end] for part in PREFILL))
        read, last = recurrence(query, key, value, decay, beta, before[slot].double())
        torch.testing.assert_close(out[start:end].double(), read, rtol=0, atol=2e-6)
        torch.testing.assert_close(states[slot].double(), last, rtol=0, atol=2e-6)
    others = [slot for slot in range(SLOTS) if slot not in IN_SLOTS.tolist()]
    assert torch.equal(states[others], before[others])


def test_a_token_of_each_request_is_read_after_its_state() -> None:
    before = drawn(SLOTS, HEADS, VALUE, KEY, seed=6)
    states, requests = before.clone(), len(IN_SLOTS)
    query, key, value, a, b = (part[:requests] for part in PREFILL)
    out = gated_delta.fused_sigmoid_gating_delta_rule_update(
        A_log=A_LOG,
        dt_bias=DT_BIAS,
        q=query[None],
        k=key[None],
        v=value[None],
        a=a,
        b=b,
        initial_state_source=states,
        initial_state_indices=IN_SLOTS,
        cu_seqlens=torch.arange(requests + 1),
        use_qk_l2norm_in_kernel=True,
    )
    parts = exact(query, key, value, a, b)
    for request, slot in enumerate(IN_SLOTS.tolist()):
        query, key, value, decay, beta = (part[request : request + 1] for part in parts)
        read, last = recurrence(query, key, value, decay, beta, before[slot].double())
        torch.testing.assert_close(out[0, request].double(), read[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(states[slot].double(), last, rtol=0, atol=1e-6)


def test_convolution_continues_from_what_it_kept() -> None:
    """A prompt in two parts and then token by token is the same as the whole."""
    width = 5
    weight, kept = drawn(width, TAPS, seed=1), drawn(SLOTS, width, TAPS - 1, seed=2)
    texts = [drawn(length + 7, width, seed=10 + length) for length in LENGTHS]
    expected = [convolution(text.double(), weight.double()) for text in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    for first, count in ((0, LENGTHS), (1, [4] * len(LENGTHS))):
        done = [sum(len(part) for part in parts) for parts in found]
        new = [text[start : start + n] for text, start, n in zip(texts, done, count, strict=True)]
        ends = torch.tensor([0, *count]).cumsum(0).int()
        out = gated_delta.causal_conv1d_fn(
            torch.cat(new).T,
            weight,
            None,
            activation="silu",
            conv_states=kept,
            has_initial_state=torch.full((len(count),), bool(first)),
            cache_indices=IN_SLOTS,
            query_start_loc=ends,
            seq_lens_cpu=count,
        ).T
        for parts, part in zip(found, out.split(count), strict=True):
            parts.append(part)
    for step in range(3):
        tokens = torch.stack([text[length + 4 + step] for text, length in zip(texts, LENGTHS, strict=True)])
        out = gated_delta.causal_conv1d_update(tokens, kept, weight, None, "silu", conv_state_indices=IN_SLOTS)
        for parts, part in zip(found, out, strict=True):
            parts.append(part[None])
    for parts, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts).double(), whole, rtol=0, atol=3e-6)


def test_norms_gates_and_cuts() -> None:
    x, gate, weight = drawn(5, 6, seed=1), drawn(5, 6, seed=2), drawn(6, seed=3)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close = {"rtol": 0, "atol": 1e-6}
    found = gated_delta.rmsnorm_gated(x, weight, gate, 1e-6)
    torch.testing.assert_close(found, normed * weight * gate * gate.sigmoid(), **close)

    heads = torch.stack([x, gate]).transpose(0, 1)  # of two heads' queries, [5, 2, 6]
    with_gates = torch.cat([heads, heads + 1], -1).reshape(5, -1)
    q, k, gates = gated_delta.fused_qk_gemma_rmsnorm_with_gate(with_gates, x, weight, weight + 1, 1e-6, 6, 2)
    torch.testing.assert_close(q.view(5, 2, 6)[:, 0], normed * (1 + weight), **close)
    torch.testing.assert_close(k, normed * (2 + weight), **close)
    assert torch.equal(gates.view(5, 2, 6), heads + 1)
    alone = gated_delta.fused_qk_gemma_rmsnorm_with_gate(with_gates[:1], x[:1], weight, weight, 1e-6, 6, 2)
    assert all(part.is_contiguous() for part in alone)  # SGLang takes views

    scaled = x.clone()
    gated_delta.fused_sigmoid_mul(scaled, gate)
    torch.testing.assert_close(scaled, x * gate.sigmoid(), **close)

    for do_add in (True, False):
        output = gate.clone()
        gated_delta.gate_shared_expert(x, weight, x + 1, output, do_add=do_add)
        torch.testing.assert_close(output - do_add * gate, (x @ weight).sigmoid()[:, None] * (x + 1), **close)

    qkvz, ba = drawn(5, 2 * 2 * 3 + 2 * 4 * 2, seed=4), drawn(5, 8, seed=5)
    qkv, z, b, a = gated_delta.fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, 2, 4, 3, 2)
    assert torch.equal(torch.cat([qkv, z.flatten(1)], 1), qkvz)
    assert torch.equal(torch.cat([b, a], 1), ba)


def test_sglang_finds_them_by_name() -> None:
    gated_delta.offer_operators()
    for name, function in gated_delta.OPERATORS.items():
        assert getattr(torch.ops.sgl_kernel, name) is function
