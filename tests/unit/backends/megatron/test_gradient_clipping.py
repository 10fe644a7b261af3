"""Norm and clipping of gradients: as Megatron's own, without a wait per gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

from miles_async.backends.megatron.optimizer import clip_gradients, gradient_norm

GRADIENTS = [torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
CPU = torch.device("cpu")


def optimizer(gradients: list[torch.Tensor], name: str = "grad") -> Any:
    """Part of an optimizer whose parameters, and one more, have these gradients in the attribute ``name``."""
    parameters = [SimpleNamespace(**{"grad": None, name: each}) for each in gradients] + [SimpleNamespace(grad=None)]
    return SimpleNamespace(
        get_parameters=lambda: parameters,
        get_grads_for_grad_norm=lambda: gradients,
        get_grad_stats_parallel_group=lambda: None,
    )


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def waits(norm: Callable[[], float]) -> int:
    """How often a value of the device is needed on the host."""
    with torch.profiler.profile() as profile:
        norm()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_local_scalar_dense")


def test_the_norm_is_megatrons_and_is_waited_for_once() -> None:
    ours, theirs = (lambda: gradient_norm(optimizer(GRADIENTS), CPU)), (lambda: get_grad_norm_fp32(GRADIENTS))
    assert ours() == pytest.approx(theirs())
    assert waits(ours) == 1
    assert waits(theirs) > len(GRADIENTS), "megatron-core's can be called again"


def test_optimizers_of_dense_layers_and_experts_have_one_norm() -> None:
    both: Any = SimpleNamespace(chained_optimizers=[optimizer(GRADIENTS[:3]), optimizer([]), optimizer(GRADIENTS[3:])])
    assert waits(lambda: gradient_norm(both, CPU)) == 1
    assert gradient_norm(both, CPU) == pytest.approx(gradient_norm(optimizer(GRADIENTS), CPU))


@pytest.mark.parametrize("name", ["grad", "decoupled_grad"])
@pytest.mark.parametrize(("largest", "factor"), [(0.5, 0.25), (2.5, 1.0), (0.0, 1.0)])
def test_gradients_beyond_the_largest_norm_are_scaled(name: str, largest: float, factor: float) -> None:
    gradients = [each.clone() for each in GRADIENTS]
    clip_gradients(optimizer(gradients, name), 2.0, largest)
    for clipped, gradient in zip(gradients, GRADIENTS, strict=True):
        torch.testing.assert_close(clipped, gradient * factor, atol=0, rtol=1e-5)


def test_a_rank_without_parameters_has_nothing_to_clip() -> None:
    clip_gradients(optimizer([]), 2.0, 1.0)
