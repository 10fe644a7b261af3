"""A layer of attention gives the same outputs and gradients whether samples share what they begin with or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integration.rank_processes import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

VOCAB, HEADS, KEY_HEADS, WIDTH = 7, 4, 2, 8
SAMPLES = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5], [1, 2], [3], [1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [3, 2, 1]]


def attend(share: bool, **settings: object) -> tuple[int, Tensor, Tensor]:
    """(Positions, outputs that predict the tokens, gradients) of attention over SAMPLES, in float64."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from miles_async.backends.megatron.host.attention import SdpaAttention
    from miles_async.backends.megatron.packing.pack import PackLayout, pack_sequences

    softcap = settings.pop("softcap", None)
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=KEY_HEADS,
        attention_dropout=0.0, **settings,
    )  # fmt: skip
    attention = SdpaAttention(config, 1)
    attention.softcap = softcap
    packed = pack_sequences(SAMPLES, PackLayout(share_prefixes=share, share=2), torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    words, places = (
        torch.randn(size, HEADS + 2 * KEY_HEADS, WIDTH, dtype=torch.float64, generator=draw, requires_grad=True)
        for size in (VOCAB, 16)
    )
    states = words[packed.tokens[0]] + places[packed.position_ids[0]]
    query, key, value = states.split([HEADS, KEY_HEADS, KEY_HEADS], 1)
    output = attention(query, key, value, packed_seq_params=packed.attention)[packed.rows][packed.row_of]
    weights = torch.randn(output.shape, dtype=torch.float64, generator=draw)
    gradients = torch.autograd.grad((output * weights).sum(), [words, places])
    return packed.tokens.numel(), output, torch.cat(gradients)


SETTINGS: dict[str, dict[str, object]] = {"plain": {}, "window": {"window_size": (2, 0)}, "softcap": {"softcap": 2.0}}


def attend_both_ways(rank: int, world_size: int, store: dist.Store) -> dict[str, Any]:
    """Plain and shared, for each of the settings; in a process that has imported Megatron."""
    return {
        name: [tuple(map(_portable, attend(share, **settings))) for share in (False, True)]
        for name, settings in SETTINGS.items()
    }


def _portable(value: int | Tensor) -> object:
    return value.detach().numpy() if isinstance(value, Tensor) else value


def test_sharing_changes_neither_outputs_nor_gradients() -> None:
    prefixes = {tuple(sample[:end]) for sample in SAMPLES for end in range(1, max(2, len(sample)))}
    tokens = sum(map(len, SAMPLES))
    for name, (plain, shared) in run_ranks(1, attend_both_ways)[0].items():
        assert (plain[0], shared[0]) == (tokens + tokens % 2, len(prefixes) + len(prefixes) % 2)
        tolerance = 1e-5 if name == "softcap" else 1e-12  # its softmax is in fp32
        np.testing.assert_allclose(shared[1], plain[1], rtol=0, atol=tolerance)
        np.testing.assert_allclose(shared[2], plain[2], rtol=0, atol=tolerance)
