"""What the stand-in for mamba-ssm's kernels allocates."""

from __future__ import annotations

import torch

from miles_async.backends.megatron.memory import kernels
from miles_async.backends.megatron.memory.live_bytes import LiveBytes

TOKENS, HEADS, SIZE, GROUPS, STATE, CHUNK = 256, 4, 16, 2, 8, 32
WIDTH, CHANNELS = HEADS * SIZE, HEADS * SIZE + 2 * GROUPS * STATE
BF16, FP32 = 2, 4


def test_the_kernel_keeps_its_output_before_the_gate() -> None:
    packed = torch.zeros(1, TOKENS, WIDTH + CHANNELS + HEADS, dtype=torch.bfloat16, requires_grad=True)
    shapes = ((CHANNELS, 4), (CHANNELS,), (HEADS,), (HEADS,), (HEADS,))
    parameters = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    with LiveBytes(but=[packed, *parameters]) as live:
        out = kernels.split_scan(packed, *parameters, headdim=SIZE, ngroups=GROUPS, chunk_size=CHUNK, seq_idx=None)
        assert live.now == 2 * out.nbytes == 2 * TOKENS * WIDTH * BF16
        chunks = TOKENS // CHUNK
        between = TOKENS * CHANNELS * BF16 + chunks * (2 * WIDTH * STATE + GROUPS * CHUNK**2) * FP32
        assert live.most >= live.now + between
        kept = live.now
        out.sum().backward()
    assert live.most >= kept + 2 * between + packed.nbytes  # their gradients, too
    assert [each.grad.shape for each in (packed, *parameters) if each.grad is not None] == [packed.shape, *shapes]
