"""Chosen tokens of the first rows take what those of all rows take."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_masking

from miles_async.backends.megatron.memory import kernels
from miles_async.backends.megatron.memory.live_bytes import LiveBytes

TOKENS, HEADS, LATENT, CHOSEN = 1024, 2, 32, 64


def taken() -> tuple[int, int]:
    """Bytes kept by Megatron's attention, and at its peak."""
    query = torch.zeros(TOKENS, 1, HEADS, LATENT + 8, requires_grad=True)
    key = torch.zeros(TOKENS, 1, 1, LATENT + 8, requires_grad=True)
    chosen = torch.arange(CHOSEN).expand(1, TOKENS, CHOSEN)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    with LiveBytes(but=[query, key, chosen, mask]) as live:
        out = dsa._unfused_absorbed_dsa_fn(query, key, chosen, 1.0, LATENT, mask=mask)
        kept = live.now
        out.sum().backward()
    return kept, live.most


def test_memory_is_the_same_and_rows_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rows = taken(), kernels._scatter
    marked: list[int] = []

    def counted(index_mask: torch.Tensor, topk_indices: torch.Tensor, *, seq_chunk_size: int) -> None:
        marked.append(index_mask.shape[1])
        rows(index_mask, topk_indices, seq_chunk_size=seq_chunk_size)

    monkeypatch.setattr(kernels, "_scatter", counted)
    with kernels.stand_ins():
        assert taken() == whole
    assert marked == [256]
    assert dsa_masking.scatter_topk_into_index_mask is rows
