"""The learning rate of each optimizer step, also with a warm-up longer than the run and after live changes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.backend import CRITIC, POLICY, MegatronBackend
from miles_async.backends.megatron.learner import critic_optimizer
from miles_async.backends.megatron.optimizer import change_peak, make_schedule


def rates(total_steps: int, **arguments: object) -> list[float]:
    return scheduled(total_steps, OptimizerArguments(lr=1.0, **arguments))


def scheduled(total_steps: int, arguments: OptimizerArguments) -> list[float]:
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "weight_decay": 0.0}
    optimizer: Any = torch.optim.SGD([group])
    schedule = make_schedule(optimizer, arguments, total_steps)
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


@pytest.mark.parametrize(
    ("critic_lr", "expected"),
    [(None, [1.0, 0.75, 0.5]), (0.1, [0.1, 0.1, 0.1]), (2.0, [2.0, 1.25, 0.5])],
)
def test_a_critic_decays_to_the_floor_of_the_policy_unless_it_begins_below(
    critic_lr: float | None, expected: list[float]
) -> None:
    policy = OptimizerArguments(lr=1.0, min_lr=0.5, lr_warmup_iters=3, lr_decay_style="linear")
    critic = critic_optimizer(CriticArguments(critic_lr=critic_lr, critic_lr_warmup_iters=1), policy)
    assert scheduled(3, critic) == pytest.approx(expected)


def test_a_schedule_continues_with_other_peaks() -> None:
    own = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "weight_decay": 0.0}
    groups = [own, {**own, "params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 1.0, "min_lr": 0.0}]
    groups.append({**own, "params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 0.5, "min_lr": 0.0})
    optimizer: Any = torch.optim.SGD(groups)
    schedule = make_schedule(optimizer, OptimizerArguments(lr=1.0, lr_decay_style="linear"), 4)
    found = []
    shares, peaks = (0.75, 0.5, 0.25, 0.0), (1.0, 0.1, 0.2, 0.2)
    for peak in peaks:
        if peak != schedule.max_lr:
            change_peak(schedule, peak)
        schedule.step(1)
        found.append([group["lr"] for group in optimizer.param_groups])
    # The third group has a peak of its own.
    expected = [[share * peak, share * peak, share * 0.5] for share, peak in zip(shares, peaks, strict=True)]
    assert found == [pytest.approx(of_step) for of_step in expected]


class StubObjective:
    """Records the coefficients that it is changed to."""

    def __init__(self, **coefficients: float | None) -> None:
        self.coefficients = coefficients

    def changed(self, **coefficients: float | None) -> StubObjective:
        return StubObjective(**coefficients)


@dataclass
class StubRunner:
    objective: StubObjective


@pytest.mark.parametrize(("critic_lr", "expected"), [(None, 0.2), (0.7, 0.7)])
def test_a_change_reaches_the_setting_of_its_name(critic_lr: float | None, expected: float) -> None:
    def learner(lr: float) -> SimpleNamespace:
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "weight_decay": 0.0, "max_lr": lr}
        optimizer: Any = torch.optim.SGD([group])
        return SimpleNamespace(scheduler=make_schedule(optimizer, OptimizerArguments(lr=lr), 4))

    backend: Any = MegatronBackend.__new__(MegatronBackend)  # without a model
    backend._learners = {POLICY: learner(1.0), CRITIC: learner(critic_lr or 1.0)}
    backend._critic_follows = critic_lr is None
    backend._runner = StubRunner(StubObjective())

    for lr in (0.1, 0.2):
        backend.change({"lr": lr})
        assert backend._runner.objective.coefficients == {"entropy": None, "kl_loss": None, "kl": None}
    rates = {}
    for name, each in backend._learners.items():
        each.scheduler.step(1)
        rates[name] = each.scheduler.optimizer.param_groups[0]["lr"]
    assert rates == {POLICY: 0.2, CRITIC: expected}

    backend.change({"entropy_coef": 0.3, "kl_loss_coef": 0.4, "kl_coef": 0.5, "max_weight_staleness": 2})
    assert backend._runner.objective.coefficients == {"entropy": 0.3, "kl_loss": 0.4, "kl": 0.5}
