"""Every kind of Adam has its state before its first step, so that a run can be saved and resumed there."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.nn import Parameter

from miles_async.backends.megatron import overrides
from miles_async.backends.megatron.optimizer import load_state, make_state
from miles_async.backends.megatron.platform import Platform

CONFIG = SimpleNamespace(use_precision_aware_optimizer=False)


def part(optimizer: object, made: list[object] | None = None, config: object = CONFIG) -> object:
    """One optimizer of Megatron's; ``made`` collects what its own function is called with."""
    init = None if made is None else lambda adam, config: made.append((adam, config))
    return SimpleNamespace(optimizer=optimizer, config=config, init_state_fn=init)


def make(*parts: object) -> None:
    make_state(SimpleNamespace(chained_optimizers=parts))  # type: ignore[arg-type]


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> HybridDeviceOptimizer:
    """An offloaded optimizer of a bf16 and an fp32 parameter."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return HybridDeviceOptimizer(
        [{"params": [Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        lr=1e-3,
    )


def test_fused_adam_gets_it_from_megatron_and_torch_from_us() -> None:
    made: list[object] = []
    weight = Parameter(torch.ones(3))
    adam, fused, other = torch.optim.AdamW([weight]), object(), object()
    make(part(adam, made), part(fused, made), part(other), part(None, made))
    assert made == [(fused, CONFIG)]
    assert {*adam.state[weight]} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("remainders", [True, False])
def test_transformer_engine_makes_the_state_of_reduced_precision(remainders: bool) -> None:
    """By its own method, whose second argument megatron-core omits."""
    half, full = Parameter(torch.ones(2, dtype=torch.bfloat16)), Parameter(torch.ones(2))
    made: list[tuple[Parameter, bool]] = []
    fused = SimpleNamespace(
        param_groups=[{"params": [half, full]}],
        state=defaultdict[Any, Any](dict),
        store_param_remainders=remainders,
        initialize_state=lambda parameter, store_param_remainders: made.append((parameter, store_param_remainders)),
    )
    make(part(fused, config=SimpleNamespace(use_precision_aware_optimizer=True)))
    assert made == [(half, remainders), (full, False)]


def test_main_weights_are_whole_unless_asked_otherwise() -> None:
    platform = Platform.cuda()
    assert not overrides.optimizer_values({}, platform)["store_param_remainders"]
    assert overrides.optimizer_values({"store_param_remainders": True}, platform)["store_param_remainders"]


def test_an_offloaded_optimizer_has_zeros_and_its_weights(hybrid: HybridDeviceOptimizer) -> None:
    make(part(hybrid))
    for parameter in hybrid.param_groups[0]["params"]:
        state = hybrid.state[parameter]
        assert [state[name].sum().item() for name in ("step", "exp_avg", "exp_avg_sq")] == [0, 0, 0]
        assert state["master_param"].tolist() == [1, 1, 1, 1]


def test_fp32_parameters_of_an_offloaded_optimizer_are_loaded_too(hybrid: HybridDeviceOptimizer) -> None:
    make(part(hybrid))
    for state in hybrid.state.values():
        state["master_param"] = torch.full((4,), 1 + 2**-20)
    with pytest.raises(KeyError):  # megatron-core 0.19: the patch can go once it doesn't
        HybridDeviceOptimizer._update_fp32_params_by_new_state(hybrid)
    hybrid._sync_hdo_state_to_sub_optimizers()
    weights = [group["params"][0] for adam in hybrid.sub_optimizers for group in adam.param_groups]
    assert [weight.tolist() for weight in weights] == [[1 + 2**-20] * 4] * 2


class CountsByGroup(torch.optim.SGD):
    """As Transformer Engine's FusedAdam does."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def test_the_half_of_an_offloaded_optimizer_on_the_gpu_counts_on_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_on_gpu(self: HybridDeviceOptimizer, fraction: float) -> tuple[object, ...]:
        return [], [{**group, "params": [*group["params"]]} for group in self.param_groups], {}, {}, {}

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", all_on_gpu)
    monkeypatch.setattr(HybridDeviceOptimizer, "_move_new_state_to_right_device", lambda self: None)
    hybrid = HybridDeviceOptimizer(
        [{"params": [Parameter(torch.ones(4))]}],
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=CountsByGroup,
        lr=1e-3,
    )
    loads = SimpleNamespace(
        optimizer=hybrid,
        state_dict=lambda: {"optimizer": hybrid.state_dict()},
        load_state_dict=lambda state: hybrid.load_state_dict(state["optimizer"]),
        load_parameter_state_from_fully_reshardable=lambda state: None,
    )
    load_state(loads, {0: None}, step=3)  # type: ignore[arg-type]
    for step in (4, 5, 6):
        hybrid.step()
        assert hybrid.gpu_optimizer.param_groups[0]["step"] == step
