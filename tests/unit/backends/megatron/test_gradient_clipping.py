"""Norm and clipping of gradients: as Megatron's own, without a wait per parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

from miles_async.backends.megatron import optimizer

GRADIENTS = [torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
NOOP = torch.zeros(1, dtype=torch.int)


def waits(norm: Callable[..., tuple[torch.Tensor, None]]) -> int:
    """How often a value of the device is needed on the host."""
    with torch.profiler.profile() as profile:
        norm(1, NOOP, [GRADIENTS], False)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_local_scalar_dense")


def test_the_norm_is_megatrons_and_stays_on_the_device() -> None:
    ours, theirs = optimizer.total_norm, utils.local_multi_tensor_l2_norm
    torch.testing.assert_close(ours(1, NOOP, [GRADIENTS], False)[0], theirs(1, NOOP, [GRADIENTS], False)[0])
    assert waits(ours) == 0
    assert waits(theirs) > len(GRADIENTS), "megatron-core needs no stand-in any more"


def test_gradients_are_scaled_as_megatron_does() -> None:
    ours, theirs = [[each.clone() for each in GRADIENTS] for _ in range(2)]
    optimizer.scale(1, NOOP, [ours, ours], 0.3)
    utils.local_multi_tensor_scale(1, NOOP, [theirs, theirs], 0.3)
    assert all(map(torch.equal, ours, theirs))


def test_functions_of_transformer_engine_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = object()
    monkeypatch.setattr(clip_grads, "l2_norm_impl", fused)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", fused)
    optimizer.clip_by_foreach()
    assert clip_grads.l2_norm_impl is fused
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    optimizer.clip_by_foreach()
    assert clip_grads.l2_norm_impl is optimizer.total_norm
    assert clip_grads.multi_tensor_scale_impl is optimizer.scale
