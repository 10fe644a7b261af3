"""Kernels that SGLang has for GPUs only, against plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from miles_async.engines.sglang.cpu.families import normalized, sums_of_squares


def test_heads_of_all_ranks_are_normalised_together() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(5, 32, generator=draw), 10 * torch.randn(5, 16, generator=draw)
    weights = torch.randn(32, generator=draw), torch.randn(16, generator=draw)
    shares = list(zip(queries.chunk(2, -1), keys.chunk(2, -1), weights[0].chunk(2), weights[1].chunk(2), strict=True))
    squares = torch.stack([sums_of_squares(q, k) for q, k, _, _ in shares]).sum(0)
    ranks = [normalized(q, k, q_weight, k_weight, squares, 2, 1e-3) for q, k, q_weight, k_weight in shares]
    for whole, weight, parts in zip((queries, keys), weights, zip(*ranks, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts, -1), F.rms_norm(whole, whole.shape[-1:], weight, 1e-3))


def test_the_dtype_is_kept_and_sums_are_in_fp32() -> None:
    rows = torch.full((2, 8), 300.0, dtype=torch.float16)  # whose squares are beyond float16
    squares = sums_of_squares(rows, rows)
    assert squares.dtype == torch.float32
    assert squares.tolist() == [8 * 300.0**2] * 4
    ones = torch.ones(8, dtype=torch.float16)
    assert torch.equal(normalized(rows, rows, ones, ones, squares)[0], torch.ones_like(rows))
