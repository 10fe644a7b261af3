"""Attention of engines on a CPU answers what SGLang's own does, for new tokens only."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

COMPARE = """
import sys
sys.argv = ["launcher", "--device", "cpu"]

import miles_async.engines.sglang.launcher  # first: makes SGLang importable
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
import sglang.srt.layers.attention.torch_native_backend as native

backend = native.TorchNativeAttnBackend.__new__(native.TorchNativeAttnBackend)
theirs = backend._run_sdpa_forward_extend
HookRegistry.apply_hooks()
ours = backend._run_sdpa_forward_extend
computed = []
attention = native.scaled_dot_product_attention

def counted(query, *args, **kwargs):
    computed.append(query.shape[-2])
    return attention(query, *args, **kwargs)

native.scaled_dot_product_attention = counted
torch.manual_seed(0)
prefixes, new = torch.tensor([0, 7, 12, 3]), torch.tensor([5, 1, 4, 1])
lengths = prefixes + new
rows = torch.randperm(200)[:6 * 20].view(6, 20)
for heads, kv_heads, dtype, causal, window in [
    (4, 4, torch.float32, True, None),
    (6, 2, torch.float32, True, None),
    (6, 2, torch.bfloat16, True, None),
    (6, 2, torch.float32, True, 0),
    (6, 2, torch.float32, True, 3),
    (6, 2, torch.float32, True, 100),
    (6, 2, torch.float32, False, None),
]:
    keys, values = torch.randn(2, 200, kv_heads, 8, dtype=dtype)
    query = torch.randn(int(new.sum()), heads, 8, dtype=dtype)
    arguments = (keys, values, rows, torch.tensor([4, 0, 5, 2]), lengths, prefixes, new, None)
    options = dict(scaling=0.3, enable_gqa=heads != kv_heads, causal=causal, is_cross_attn=False)
    options["sliding_window_size"] = window
    expected = theirs(query, torch.empty_like(query), *arguments, **options)
    assert computed == lengths.tolist()  # of cached tokens, too: what the patch is for
    computed.clear()
    found = ours(query, torch.full_like(query, torch.nan), *arguments, **options)
    assert computed == ([] if causal else lengths.tolist())
    computed.clear()
    torch.testing.assert_close(found, expected)
print("alike")
"""


def test_it_answers_what_sglang_does() -> None:
    ran = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "alike"
