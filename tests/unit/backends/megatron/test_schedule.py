"""The learning rate of each optimizer step, also where the warm-up would be longer than the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.optimizer import make_schedule


def rates(total_steps: int, **arguments: object) -> list[float]:
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "weight_decay": 0.0}
    optimizer: Any = torch.optim.SGD([group])
    schedule = make_schedule(optimizer, OptimizerArguments(lr=1.0, **arguments), total_steps)
    found = []
    for _ in range(total_steps):
        schedule.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_warm_up_takes_no_more_steps_than_the_run_has(decay: object) -> None:
    assert rates(4, lr_warmup_iters=5000, lr_decay_style=decay) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_shorter_warm_up_is_as_asked() -> None:
    assert rates(4, lr_warmup_iters=2) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert rates(4, lr_warmup_iters=2, lr_decay_style="linear") == pytest.approx([0.5, 1.0, 0.5, 0.0])
