"""State of Adam where megatron-core 0.16 mishandles it.

- A checkpoint can't be saved before, nor loaded by an optimizer that never made, its first step.

Megatron takes fused Adam of Transformer Engine or Apex where one is installed, which keeps ``step`` once per group of
parameters, and else torch's AdamW, on every machine without CUDA. With that

- a load makes all parameters share one ``step`` tensor, which each of them increments: from the second step
  after a resume on, Adam's bias correction runs too fast by the number of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def make_state(optimizer: MegatronOptimizer) -> None:
    """Create the state that the first optimizer step would create."""
    for part in _parts(optimizer):
        if part.optimizer is None or isinstance(part.optimizer, TORCH_ADAM) or part.init_state_fn is None:
            continue
        part.init_state_fn(part.optimizer, part.config)  # fused Adam: what Megatron calls before a load
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
    for part in _parts(optimizer):
        adam = part.optimizer
        if isinstance(adam, TORCH_ADAM):
            for group in adam.param_groups:
                yield from ((adam, parameter) for parameter in group["params"])


def _parts(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """Dense layers and experts have an optimizer each if they are sharded differently."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
