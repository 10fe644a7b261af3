"""Attention of engines on a CPU answers what SGLang's own does."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.integration]

COMPARE = """
import sys
sys.argv = ["launcher", "--device", "cpu"]

import miles_async.engines.sglang.launcher  # first: makes SGLang importable
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
import sglang.srt.layers.attention.torch_native_backend as native

backend = native.TorchNativeAttnBackend.__new__(native.TorchNativeAttnBackend)
theirs = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode
HookRegistry.apply_hooks()
backend.miles_async_softcap, backend.miles_async_places = 0.0, None  # which are taken from the layer
ours = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode
computed = []
attention = native.scaled_dot_product_attention

def counted(query, *args, **kwargs):
    computed.append(query.shape[-2])
    return attention(query, *args, **kwargs)

native.scaled_dot_product_attention = counted
torch.manual_seed(0)
prefixes, new = torch.tensor([3, 7, 12, 3, 0]), torch.tensor([5, 1, 4, 1, 2])
slots = torch.randperm(200)[:7 * 20].view(7, 20).int()
alike = slots.clone()
alike[:, :3] = slots[0, :3]  # what all begin with
for rows, heads, kv_heads, dtype, causal, window in [
    (slots, 4, 4, torch.float32, True, None),
    (slots, 6, 2, torch.float32, True, None),
    (alike, 6, 2, torch.float32, True, None),
    (alike, 6, 2, torch.bfloat16, True, None),
    (alike, 6, 2, torch.float32, True, 0),
    (alike, 6, 2, torch.float32, True, 3),
    (alike, 6, 2, torch.float32, True, 100),
    (alike, 6, 2, torch.float32, False, None),
]:
    for requests in (slice(0, 4), slice(0, 5), slice(1, 2)):  # with the fifth not all begin alike
        keys, values = torch.randn(2, 200, kv_heads, 8, dtype=dtype)
        indices = torch.tensor([4, 0, 5, 2, 1])[requests]
        cached, asked = prefixes[requests], new[requests]
        lengths = cached + asked
        close = dict(rtol=0, atol=1e-5 if dtype == torch.float32 else 2**-7)
        held = keys, values, rows, indices, lengths
        options = dict(scaling=0.3, enable_gqa=heads != kv_heads, causal=causal, is_cross_attn=False)
        options["sliding_window_size"] = window
        query = torch.randn(int(asked.sum()), heads, 8, dtype=dtype)
        expected = theirs[0](query, torch.empty_like(query), *held, cached, asked, None, **options)
        assert computed == lengths.tolist()  # of cached tokens, too
        computed.clear()
        found = ours[0](query, torch.full_like(query, torch.nan), *held, cached, asked, None, **options)
        assert computed == ([] if causal else lengths.tolist())
        computed.clear()
        torch.testing.assert_close(found, expected, **close)
        query, options["causal"] = torch.randn(len(lengths), heads, 8, dtype=dtype), False  # as forward_decode does
        expected = theirs[1](query, torch.empty_like(query), *held, None, **options)
        assert computed == [1] * len(lengths)
        computed.clear()
        found = ours[1](query, torch.full_like(query, torch.nan), *held, None, **options)
        assert computed == []
        torch.testing.assert_close(found, expected, **close)
print("alike")
"""


def test_it_answers_what_sglang_does() -> None:
    ran = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "alike"
