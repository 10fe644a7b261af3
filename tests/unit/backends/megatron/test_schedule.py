"""The learning rate of each optimizer step, also where the warm-up would be longer than the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.optimizer import change_peak, make_schedule


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


def test_a_schedule_continues_with_another_peak() -> None:
    own = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "weight_decay": 0.0}
    groups = [own, {**own, "params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 1.0, "min_lr": 0.0}]
    groups.append({**own, "params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 0.5, "min_lr": 0.0})
    optimizer: Any = torch.optim.SGD(groups)
    schedule = make_schedule(optimizer, OptimizerArguments(lr=1.0, lr_decay_style="linear"), 4)
    found = []
    for step in range(4):
        if step == 2:
            change_peak(schedule, 0.1)
        schedule.step(1)
        found.append([group["lr"] for group in optimizer.param_groups])
    # The third group has a peak of its own.
    shares, peaks = (0.75, 0.5, 0.25, 0.0), (1.0, 1.0, 0.1, 0.1)
    expected = [[share * peak, share * peak, share * 0.5] for share, peak in zip(shares, peaks, strict=True)]
    assert found == [pytest.approx(of_step) for of_step in expected]
