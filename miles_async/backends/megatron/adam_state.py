"""State of torch's AdamW where megatron-core 0.16 mishandles it; fused Adam (Apex, Transformer Engine) is left alone.

Megatron takes torch's AdamW where neither is installed, which is every machine without CUDA. Then

- a checkpoint can't be saved before, nor loaded by an optimizer that never made, its first step;
- a load makes all parameters share one ``step`` tensor, which each of them increments: from the second step
  after a resume on, Adam's bias correction runs too fast by the number of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def make_state(optimizer: MegatronOptimizer) -> None:
    """Create the state that the first optimizer step would create."""
    for adam, parameter in _torch_adam_parameters(optimizer):
        if not adam.state[parameter]:
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own ``step`` after a load."""
    for adam, parameter in _torch_adam_parameters(optimizer):
        adam.state[parameter]["step"] = adam.state[parameter]["step"].clone()


def _torch_adam_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            for group in adam.param_groups:
                yield from ((adam, parameter) for parameter in group["params"])
