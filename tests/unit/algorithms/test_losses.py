"""The loss of a micro-batch against numbers worked out by hand, and against plain autograd of each formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from miles_async.algorithms.losses.sat import contraction
from miles_async.algorithms.mismatch import effective_sample_size
from miles_async.algorithms.objective import make_objective
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.fakes.token_batches import token_batch


def loss_of(batch: TokenBatch, logprobs: Tensor, **flags: object) -> tuple[Tensor, Mapping[str, Tensor]]:
    """(loss, metrics); where log-probs require gradients, they have them then."""
    objective = make_objective(AlgorithmArguments(**flags))
    entropy = torch.full_like(logprobs, 0.5) if "entropy" in objective.needs else None
    if objective.old_policy == "rollout":
        batch = batch.with_computed("old_logprobs", batch.rollout_logprobs)
    sums = objective(logprobs, batch, entropy=entropy)
    assert sums.count == batch.loss_mask.count_nonzero()
    if logprobs.requires_grad:
        sums.loss.backward()
    return sums.loss, sums.metrics


def test_on_policy_loss_is_minus_the_advantage() -> None:
    batch = token_batch(old=[-1.0, -2.0, -0.5], advantages=[1.0, -2.0, 0.5])
    logprobs = batch.old_logprobs.clone().requires_grad_()
    total, sums = loss_of(batch, logprobs)
    assert total.item() == pytest.approx(0.5)
    assert torch.allclose(logprobs.grad, -batch.advantages)  # the REINFORCE gradient
    assert sums["clip_fraction"] == 0
    assert sums["ratio_mean"] == 3
    assert sums["dual_clip_fraction"] == 0
    assert "entropy" not in sums


def test_entropy_is_logged_if_asked_for() -> None:
    batch = token_batch(old=[-1.0, -2.0, -0.5], advantages=[1.0, -2.0, 0.5], mask=[1.0, 0.0, 1.0])
    _, sums = loss_of(batch, batch.old_logprobs, log_entropy=True)
    assert sums["entropy"] == 1.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.5, 1.0, -1.28, True),  # above the upper clip, which would reward going further
        (1.25, 1.0, -1.25, False),  # between 1 + eps_clip and 1 + eps_clip_high: clip-higher lets it pass
        (1.5, -1.0, 1.5, False),  # the worse of the two counts: no clip
        (0.5, -1.0, 0.8, True),  # below the lower clip
        (0.5, 1.0, -0.5, False),
    ],
)
def test_clip_is_asymmetric_and_pessimistic(ratio: float, advantage: float, expected: float, clipped: bool) -> None:
    """DAPO's clip-higher on PPO's minimum."""
    batch = token_batch(old=[-2.0], advantages=[advantage])
    logprobs = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    total, sums = loss_of(batch, logprobs, eps_clip=0.2, eps_clip_high=0.28)
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert bool(sums["clip_fraction"]) is clipped
    assert (logprobs.grad.item() == 0) is clipped
    assert sums["ratio_max"] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "cap", "expected", "capped"),
    [
        (2.5, -2.0, 3.0, 5.0, False),
        (4.0, -2.0, 3.0, 6.0, True),  # c · |A|
        (4.0, -2.0, 5.0, 8.0, False),
        (4.0, -2.0, None, 8.0, False),
        (4.0, 2.0, 3.0, -2.4, False),  # PPO's clip bounds positive advantages
        (0.1, -2.0, 3.0, 1.6, False),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(
    ratio: float, advantage: float, cap: float | None, expected: float, capped: bool
) -> None:
    """Ye et al. 2020, eq. 5."""
    batch = token_batch(old=[-2.0], advantages=[advantage])
    logprobs = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    total, sums = loss_of(batch, logprobs, eps_clip=0.2, eps_clip_c=cap)
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert bool(sums.get("dual_clip_fraction", 0)) is capped
    if capped:
        assert logprobs.grad.item() == 0


def test_a_token_that_the_engine_found_unlikely_cannot_blow_up_the_gradient() -> None:  # covers: C12
    batch = token_batch(old=[-1.0, -1.0], rollout=[-18.0, -1.0], advantages=[-1.0, -1.0])
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    total, sums = loss_of(batch, logprobs, use_rollout_logprobs=True)
    assert total.item() == pytest.approx(3.0 + 1.0)
    assert logprobs.grad.tolist() == [0, 1]
    assert sums["dual_clip_fraction"] == 1


def test_rollout_logprobs_are_the_old_policy_on_request() -> None:  # covers: C12
    """The clip then bounds the distance from the policy that sampled, however stale."""
    batch = token_batch(old=[-1.0], rollout=[-3.0], advantages=[1.0])
    total, sums = loss_of(batch, torch.tensor([-1.0]), use_rollout_logprobs=True)
    assert total.item() == pytest.approx(-1.2)
    assert sums["ratio_mean"].item() == pytest.approx(math.exp(2.0))
    assert make_objective(AlgorithmArguments(use_rollout_logprobs=True)).old_policy == "rollout"
    assert make_objective(AlgorithmArguments()).old_policy == "trainer"


def test_truncated_importance_weight_scales_the_loss_without_gradient() -> None:  # covers: C12
    batch = token_batch(old=[-1.0, -1.0], rollout=[-1.5, -3.0], advantages=[1.0, 1.0])
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    total, sums = loss_of(batch, logprobs, use_tis=True, tis_clip=2.0)
    weights = torch.tensor([math.exp(0.5), 2.0])  # exp(2) is capped
    assert total.item() == pytest.approx(-weights.sum().item(), rel=1e-6)
    assert torch.allclose(logprobs.grad, -weights)
    assert sums["tis_weight_mean"].item() == pytest.approx(weights.sum().item())
    assert sums["tis_weight_max"] == 2.0
    assert sums["tis_capped_fraction"] == 1
    assert sums["tis_masked_fraction"] == 0


@pytest.mark.parametrize(("low", "high", "outside"), [(0.0, 0.5, 1), (0.5, 0.0, 1), (0.5, 0.5, 0)])
def test_dis_leaves_out_a_token_at_a_bound_of_its_range(low: float, high: float, outside: int) -> None:
    batch = token_batch(old=[-1.0], advantages=[1.0])  # the ratio is 1
    _, sums = loss_of(batch, batch.old_logprobs, policy_loss="dis", eps_clip=low, eps_clip_high=high)
    assert sums["clip_fraction"] == outside


@pytest.mark.parametrize("bounds", [{"rs_upper_bound": 0.0}, {"rs_lower_bound": 0.5}])
def test_a_token_at_the_bound_of_rejection_is_kept(bounds: dict[str, float]) -> None:
    # k2 of the three tokens is 0, 0.5 and 2.
    batch = token_batch(old=[-1.0] * 3, rollout=[-1.0, -2.0, -3.0], advantages=[1.0] * 3)
    _, sums = loss_of(batch, torch.tensor([-1.0] * 3), use_rs=True, rs_statistic="k2", **bounds)
    assert sums["rs_rejected_fraction"] == (2 if "rs_upper_bound" in bounds else 1)


def test_tokens_that_are_too_old_are_counted() -> None:
    versions = torch.tensor([3, 4, 5, 6, 6])  # ages 3, 2, 1, 0, 0
    batch = replace(token_batch(old=[-1.0] * 5, advantages=[1.0] * 5), weight_versions=versions, target_version=6)
    total, sums = loss_of(batch, batch.old_logprobs, max_token_age=2, token_age_decay=0.5)
    assert total.item() == -(0.25 + 0.5 + 1.0 + 1.0)
    assert sums["age_masked_fraction"] == 1
    assert sums["age_weight_mean"] == 0.25 + 0.5 + 1.0 + 1.0


def test_sat_contracts_above_its_quantile_and_not_at_it() -> None:
    factors = contraction(torch.tensor([0.5, -1.0, 1.0, 3.0]), torch.tensor(1.0))
    assert factors.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.1])


def test_the_effective_sample_size_of_none_is_zero() -> None:
    assert effective_sample_size(torch.full((3,), -torch.inf)) == 0.0


def test_tokens_that_opsm_leaves_out_are_counted() -> None:
    flags = {"lengths": [3, 1, 1], "rollout": [-1.0] * 5, "advantages": [-1.0, -1.0, -1.0, 1.0, -1.0]}
    batch = token_batch(old=[-3.0, -3.0, -3.0, -3.0, -1.0], **flags)  # only the first sequence is bad and drifted
    _, sums = loss_of(batch, batch.old_logprobs, use_opsm=True, opsm_delta=0.5)
    assert sums["opsm_masked_fraction"] == 3


def test_importance_weights_outside_of_the_bounds_mask_their_tokens() -> None:
    batch = token_batch(old=[-1.0, -1.0, -1.0], rollout=[-1.5, -3.0, -0.1], advantages=[1.0, 1.0, 1.0])
    total, sums = loss_of(
        batch, torch.tensor([-1.0, -1.0, -1.0]), use_tis=True, tis_mode="mask", tis_clip=2.0, tis_clip_low=0.5
    )
    assert total.item() == pytest.approx(-math.exp(0.5), rel=1e-6)
    assert sums["tis_capped_fraction"] == 2
    assert sums["tis_masked_fraction"] == 2


def test_kl_loss_is_k3_with_its_own_gradient() -> None:
    batch = token_batch(old=[-1.0], advantages=[0.0], ref_logprobs=[-2.0])
    logprobs = torch.tensor([-1.0], requires_grad=True)
    total, sums = loss_of(batch, logprobs, use_kl_loss=True, kl_loss_coef=0.1)
    k3 = math.exp(-1.0) + 1.0 - 1.0  # d = ref − policy = −1
    assert total.item() == pytest.approx(0.1 * k3)
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - math.exp(-1.0)))
    assert sums["ref_kl"].item() == pytest.approx(k3)
    assert make_objective(AlgorithmArguments(use_kl_loss=True)).needs == {"old_logprobs", "ref_logprobs"}


def test_masked_tokens_change_nothing_whatever_they_hold() -> None:
    flags = {"use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.1}
    alone, alone_sums = loss_of(
        token_batch(old=[-1.0], advantages=[1.0], ref_logprobs=[-1.0]), torch.tensor([-1.1]), **flags
    )
    batch = token_batch(
        old=[-1.0, -1.0],
        advantages=[1.0, 1.0],
        mask=[1.0, 0.0],
        rollout=[-1.0, -500.0],
        ref_logprobs=[-1.0, 300.0],
    )
    logprobs = torch.tensor([-1.1, -400.0], requires_grad=True)
    total, sums = loss_of(batch, logprobs, **flags)
    assert total.item() == pytest.approx(alone.item())
    assert logprobs.grad[1] == 0
    assert {k: v.item() for k, v in sums.items()} == pytest.approx({k: v.item() for k, v in alone_sums.items()})


@pytest.mark.parametrize("count", [0, 3])
def test_a_mask_of_zeros_gives_zero_and_zero_gradient(count: int) -> None:  # covers: R10
    batch = token_batch(old=[-1.0] * count, advantages=[1.0] * count, mask=[0.0] * count)
    logprobs = torch.full((count,), -2.0, requires_grad=True)
    total, sums = loss_of(batch, logprobs, use_tis=True)
    assert total == 0
    assert torch.all(logprobs.grad == 0)
    assert all(value == 0 for value in sums.values())
