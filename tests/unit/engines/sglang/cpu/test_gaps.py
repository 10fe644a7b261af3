"""Kernels that SGLang has for GPUs only, against plain PyTorch; processors where torchvision is absent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
from transformers.utils.import_utils import is_torchvision_available

from miles_async.engines.sglang.cpu.gaps import normalized, own_experts, route, sums_of_squares, without_videos


def test_a_router_of_gemma_4_scales_what_it_normalises() -> None:
    """As transformers' does."""
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    config = Gemma4TextConfig(hidden_size=16, num_experts=6, top_k_experts=2, num_hidden_layers=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs, x = Gemma4TextRouter(config), torch.randn(5, 16)
        theirs.scale.data.normal_()
    router = SimpleNamespace(
        norm=SimpleNamespace(eps=config.rms_norm_eps),
        scale=theirs.scale,
        root_size=torch.tensor(16**-0.5),
        proj=lambda scaled: (theirs.proj(scaled), None),
    )
    torch.testing.assert_close(route(router, x).softmax(-1), theirs(x)[0])


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


class Chosen(NamedTuple):
    """SGLang's ``StandardTopKOutput``."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


def test_ranks_with_experts_of_their_own_add_up_to_the_mixture() -> None:
    """Two ranks have two of the four experts each. The third token has chosen no expert of the second rank."""
    draw = torch.Generator().manual_seed(0)
    x, experts, weights = (torch.randn(*shape, generator=draw) for shape in ((3, 8), (4, 8, 8), (3, 2)))
    ids = torch.tensor([[0, 3], [2, 3], [1, 0]])

    def compute(matrices: torch.Tensor, x: torch.Tensor, chosen: Chosen, _: Any) -> torch.Tensor:
        assert len(x)
        assert (chosen.topk_ids >= 0).all()
        found = torch.einsum("th,tkhi->tki", x, matrices[chosen.topk_ids])
        return (found * chosen.topk_weights[..., None]).sum(1)

    whole = compute(experts, x, Chosen(weights, ids, weights), None)
    torch.testing.assert_close(own_experts(compute, experts, x, Chosen(weights, ids, weights), None), whole)
    ranks = [
        own_experts(compute, experts[first : first + 2], x, Chosen(weights, here, weights), None)
        for first in (0, 2)
        if (here := torch.where((ids >= first) & (ids < first + 2), ids - first, -1)) is not None
    ]
    torch.testing.assert_close(sum(ranks), whole)
    assert not ranks[1][2].any()
    nothing = Chosen(weights[2:], torch.full((1, 2), -1), weights[2:])
    assert not own_experts(compute, experts, x[2:], nothing, None).any()


@pytest.mark.skipif(is_torchvision_available(), reason="with torchvision nothing is left out")
def test_videos_are_left_out_and_transformers_could_not_read_them() -> None:
    names = Qwen2_5_VLProcessor.get_attributes()
    assert names == ["image_processor", "tokenizer", "video_processor"]  # the last one, so that others keep their place
    assert without_videos(lambda cls: names)(Qwen2_5_VLProcessor) == names[:2]
    with pytest.raises(ImportError, match="requires the Torchvision library"):
        Qwen2VLVideoProcessor()
