"""Every kind of Adam has its state before its first step, so that a run can be saved and resumed there."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from miles_async.backends.megatron.optimizer import make_state


def part(optimizer: object, made: list[object] | None) -> object:
    """One optimizer of Megatron's; ``made`` collects what its own function is called with."""
    init = None if made is None else lambda adam, config: made.append((adam, config))
    return SimpleNamespace(optimizer=optimizer, config="config", init_state_fn=init)


def test_fused_adam_gets_it_from_megatron_and_torch_from_us() -> None:
    made: list[object] = []
    weight = torch.nn.Parameter(torch.ones(3))
    adam, fused, offloaded = torch.optim.AdamW([weight]), object(), object()
    make_state(
        SimpleNamespace(  # type: ignore[arg-type]
            chained_optimizers=[part(adam, made), part(fused, made), part(offloaded, None), part(None, made)]
        )
    )
    assert made == [(fused, "config")]
    assert {*adam.state[weight]} == {"step", "exp_avg", "exp_avg_sq"}
