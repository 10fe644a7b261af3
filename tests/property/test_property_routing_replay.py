"""Experts stay with their tokens however a batch is packed and split over ranks. # covers: M19"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from miles_async.errors import ContractViolation
from miles_async.types import NOT_SHOWN, TrainBatch

LAYERS, EXPERTS = (0, 2), 256  # the layer between has no router


def choices(tokens: np.ndarray) -> np.ndarray:
    """[N, 3 layers × top-2]: two experts in each layer that tell the token."""
    low, high = 2 * (tokens % 100), 2 * (tokens // 100)
    nothing = np.zeros_like(tokens)
    return np.stack([low, low + 1, nothing, nothing, high + 1, high], 1).astype(np.uint8)


def batch_of(lengths: list[int]) -> TrainBatch:
    """Every token differs from all others, and from padding, which is 0."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    count = len(lengths)
    return TrainBatch(
        tokens=tokens,
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        loss_mask=np.ones(len(tokens), np.uint8),
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        weight_versions=np.zeros(len(tokens), np.int32),
        oldest_versions=np.zeros(count, np.int32),
        advantages=np.zeros(count, np.float32),
        rewards=np.zeros(count, np.float32),
        sample_ids=np.arange(count),
        group_ids=np.arange(count),
        shown=np.full(count, NOT_SHOWN),
        routed_experts=choices(tokens),
    )


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 4))
def test_every_position_of_every_rank_has_the_experts_of_its_token(
    lengths: list[int], context: int, share: int
) -> None:
    from miles_async.backends.megatron.packing.pack import PackLayout, pack_batch, pack_filler
    from miles_async.backends.megatron.packing.routing_replay import RoutingLayout

    batch, seen = batch_of(lengths), []
    last = set(batch.tokens[batch.offsets[1:] - 1].tolist())
    for context_rank in range(context):
        for share_rank in range(share):
            routing = RoutingLayout(layers=LAYERS, topk=2, experts=EXPERTS, share=share, share_rank=share_rank)
            layout = PackLayout(share=share, context_size=context, context_rank=context_rank, routing=routing)
            packed = pack_batch(batch, 0, layout, torch.device("cpu"))
            tokens = np.array_split(packed.tokens[0].numpy(), share)[share_rank]
            found = np.concatenate([packed.experts[layer].numpy() for layer in LAYERS], 1)
            known = np.array([token != 0 and token not in last for token in tokens.tolist()], bool)
            assert (found == choices(tokens)[:, [0, 1, 4, 5]])[known].all()
            assert (found[:, 0] != found[:, 1]).all()
            assert (found[:, 2] != found[:, 3]).all()
            seen += tokens[known].tolist()
            filler = pack_filler(layout, torch.device("cpu"))
            assert all(len(filler.experts[layer]) == filler.tokens.shape[1] // share for layer in LAYERS)
    assert sorted(seen) == sorted(set(batch.tokens.tolist()) - last)


def test_an_expert_that_was_chosen_twice_is_refused() -> None:
    """Its layer was not captured, or is none of those that the engine has."""
    from miles_async.backends.megatron.packing.routing_replay import RoutingLayout, replayed_experts

    layout = RoutingLayout(layers=(1,), topk=2, experts=EXPERTS, share=1, share_rank=0)
    with pytest.raises(ContractViolation, match="2 different experts of every token in layer 1, found one twice"):
        replayed_experts(choices(np.arange(4)), np.arange(4), layout)


def test_without_replay_no_experts_are_laid_out() -> None:
    from miles_async.backends.megatron.packing.pack import PackLayout, pack_batch, pack_filler

    assert pack_batch(batch_of([3]), 0, PackLayout(), torch.device("cpu")).experts is None
    assert pack_filler(PackLayout(), torch.device("cpu")).experts is None
