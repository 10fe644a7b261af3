"""Flags under which our code is compared with the references, and the comparison."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from miles_async.algorithms.objective import LossSums, Objective, make_objective
from miles_async.algorithms.value_loss import ValueLoss
from miles_async.algorithms.whole_batch.transform import WholeBatch
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.unit.algorithms.ranks import alone
from tests.unit.algorithms.references import Flags, covariances, loss_of_step, value_loss_of_step
from tests.unit.algorithms.steps import (
    HAIR,
    Adjust,
    Edges,
    Floats,
    Step,
    divergences,
    joined,
    mean_log_ratio,
    micro_batch,
    no_edges,
    random_step,
    ratios,
    sum_of_k2,
    unadjusted,
)

SEEDS = range(4)
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Case:
    """One choice of flags."""

    name: str
    flags: Flags
    edges: Edges = no_edges
    adjust: Adjust = unadjusted
    value_clip: float | None = 0.2  # of the critic, where flags need one
    tune: Callable[[Step, int], Flags] = lambda step, seed: {}  # flags that put an edge where the step is

    def step(self, seed: int) -> Step:
        per_token = self.flags.get("advantage_estimator") == "token_rewards"
        step = random_step(seed, self.edges, self.adjust)
        return [replace(trajectory, per_token=per_token) for trajectory in step]


REINFORCE_PP: Flags = {"token_advantages": "kl_in_reward", "kl_coef": 0.1, "normalize_advantages": True}
CLIP: Flags = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 3.0}
EDGES = ratios(0.8, 1.28, 3.0)


def binary_kl(p: Floats, q: Floats) -> Floats:
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def at_second_moment(step: Step, seed: int) -> Flags:
    """A threshold a hair beside the mean of about half of the moments, up to that of a token with an advantage."""
    moments, order = torch.cat([(one.old - one.rollout)[one.mask].square() for one in step]).sort()
    counts = torch.cat([one.advantages[one.mask] != 0 for one in step])[order]
    last = next(index for index in range(len(moments) // 2, len(moments)) if counts[index])
    return {"m2_threshold": float(moments[: last + 1].mean()) * (1 + HAIR * (-1) ** seed)}


def at_share(name: str, share: float) -> Callable[[Step, int], Flags]:
    """A share of tokens a hair below a whole number of them."""

    def tune(step: Step, seed: int) -> Flags:
        tokens = sum(int(one.mask.sum()) for one in step)
        return {name: round(share * tokens) * (1 - HAIR) / tokens}

    return tune


def at_covariances(step: Step, seed: int) -> Flags:
    """Bounds a hair beside the covariances of two tokens that have an advantage and are not clipped."""
    near = {
        (number, t)
        for number, one in enumerate(step)
        for t in range(len(one.old))
        if one.advantages[t] != 0 and abs(float(one.logprobs[t].detach() - one.old[t])) < 0.15
    }
    found = sorted(value for token, value in covariances(step).items() if abs(value) > 0.1 and token in near)
    low, high = found[len(found) // 4], found[-1 - len(found) // 4]
    hair = HAIR * (-1) ** seed
    return {"clip_cov_lb": low * (1 + hair), "clip_cov_ub": high * (1 + hair)}


def at_staleness(step: Step, seed: int) -> Flags:
    """A quantile that is the staleness of a token whose loss depends on whether its clip is contracted."""
    found = sorted(float((one.before - one.old).abs()[t]) for one in step for t in range(len(one.old)) if one.mask[t])
    for one in step:
        for t in range(len(one.old)):
            d, advantage = float((one.logprobs.detach() - one.old)[t]), float(one.advantages[t])
            binds = 0.12 < abs(math.exp(d) - 1) < 0.19 and advantage * d > 0
            if one.mask[t] and binds and abs(float((one.before - one.logprobs.detach())[t])) < 2 * HAIR * abs(d):
                place = found.index(float((one.before - one.old).abs()[t])) + 1
                return {"sat_quantile": place * (1 - HAIR) / len(found)}
    return {}


CASES = (
    Case("ppo", CLIP, EDGES),
    Case(
        "ppo without a dual clip, mean of means",
        CLIP | {"eps_clip_c": None, "loss_aggregation": "sequence_mean"},
        ratios(math.exp(20)),
    ),
    Case("Dr. GRPO", {"loss_aggregation": "sequence_sum", "loss_length_normalizer": 17}, ratios(0.8, 1.2)),
    Case("gspo", CLIP | {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"}, EDGES),
    Case("gspo, narrow", {"policy_loss": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, "eps_clip_c": None}),
    Case("cispo", CLIP | {"policy_loss": "cispo"}, EDGES),
    Case("cispo without a lower bound", {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.28}, EDGES),
    Case("sapo", {"policy_loss": "sapo", "tau_pos": 0.9, "tau_neg": 1.6, "loss_aggregation": "sequence_mean"}),
    Case(
        "gmpo",
        {"policy_loss": "gmpo", "eps_clip": 0.4, "eps_clip_high": 0.5, "loss_aggregation": "sequence_mean"},
        ratios(0.6703200460356393, 1.6487212707001282),  # exp(-0.4), exp(0.5)
    ),
    Case(
        "dppo_tv",
        {"policy_loss": "dppo_tv", "eps_clip": 0.05, "eps_clip_high": 0.1},
        divergences(lambda p, q: abs(p - q), below=0.05, above=0.1),
    ),
    Case("dppo_tv, ratios", {"policy_loss": "dppo_tv", "eps_clip": 0.3, "eps_clip_high": 0.3}, ratios(3.0)),
    Case(
        "dppo_kl",
        {"policy_loss": "dppo_kl", "eps_clip": 0.01, "eps_clip_high": 0.02, "eps_clip_c": None},
        divergences(binary_kl, below=0.01, above=0.02),
    ),
    Case("sat", CLIP | {"policy_loss": "sat"}, EDGES),
    Case("sat, much contracted", CLIP | {"policy_loss": "sat"}, ratios(0.84, 1.15), tune=at_staleness),
    Case("sat, all contracted", {"policy_loss": "sat", "sat_quantile": 1e-3, "eps_clip_c": None}),
    Case(
        "sat_gspo",
        {"policy_loss": "sat_gspo", "sat_quantile": 0.3, "loss_aggregation": "sequence_mean"},
        adjust=mean_log_ratio(0.12),
    ),
    Case("dis", {"policy_loss": "dis", "eps_clip": 0.3, "eps_clip_high": 5.0}, ratios(0.7, 6.0)),
    Case("tis per token", {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.5}, ratios(0.5, 1.5)),
    Case("tis per sequence", {"use_tis": True, "tis_level": "sequence", "tis_clip": 50.0}),
    Case(
        "tis per sequence, hardly bounded",
        {"use_tis": True, "tis_level": "sequence", "tis_clip": 1e9},
        adjust=mean_log_ratio(25.0),
    ),
    Case("tis by geometric mean", {"use_tis": True, "tis_level": "geometric", "tis_clip": 1.1, "tis_clip_low": 0.9}),
    Case("IcePop", {"use_tis": True, "tis_mode": "mask", "tis_clip": 5.0, "tis_clip_low": 0.5}, ratios(0.5, 5.0)),
    Case("decoupled, interpolated", CLIP | {"use_tis": True, "prox_logp_method": "loglinear"}, EDGES),
    Case("gspo, weighed", {"policy_loss": "gspo", "use_tis": True, "loss_aggregation": "sequence_mean"}),
    Case("rejection by ratio", {"use_rs": True, "rs_lower_bound": 0.6, "rs_upper_bound": 1.6}, ratios(0.6, 1.6)),
    Case("rejection by k1", {"use_rs": True, "rs_statistic": "k1", "rs_upper_bound": 1.2}, ratios(math.exp(-1.2))),
    Case(
        "rejection of sequences by k2",
        {"use_rs": True, "rs_statistic": "k2", "rs_level": "sequence", "rs_upper_bound": 0.5},
        adjust=sum_of_k2(0.5),
    ),
    Case(
        "rejection by k3",
        {"use_rs": True, "rs_statistic": "k3", "rs_upper_bound": math.exp(2) - 3},
        ratios(math.exp(2)),
    ),
    Case(
        "rejection by geometric mean, with a veto",
        {"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 2.0, "rs_veto_threshold": 1e-8},
        adjust=mean_log_ratio(math.log(2.0)),
    ),
    Case("veto", {"use_rs": True, "rs_veto_threshold": 0.2}, ratios(0.2)),
    Case("opsm", {"use_opsm": True, "opsm_delta": 0.02}, adjust=mean_log_ratio(-0.02)),
    Case("REINFORCE++", REINFORCE_PP),
    *(
        Case(f"{name} in the reward", {"token_advantages": "kl_in_reward", "kl_coef": 0.3, "kl_reward_type": name})
        for name in ("k2", "k3", "abs")
    ),
    *(
        Case(f"{name} as a loss", {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": name})
        for name in ("k1", "k2", "k3", "low_var_kl", "abs")
    ),
    Case("k3 as a loss, next to weights", {"use_kl_loss": True, "kl_loss_coef": 0.05, "use_tis": True, **CLIP}, EDGES),
    Case(
        "m2po",
        {"use_tis": True, "tis_clip": 1e9, "eps_clip": 1e9, "eps_clip_c": None, "m2_threshold": 0.04},
        tune=at_second_moment,
    ),
    Case("distillation", {"use_opd": True, "opd_kl_coef": 0.7, "policy_loss": "sapo"}),
    Case(
        "distillation after whitening",
        {"use_opd": True, "opd_student": "rollout", "normalize_advantages": True, "policy_loss": "cispo"},
    ),
    Case("clip_cov", {"policy_loss": "clip_cov", "clip_cov_ratio": 1.0, "eps_clip_c": None}, tune=at_covariances),
    Case(
        "clip_cov, drawn",
        {"policy_loss": "clip_cov", "clip_cov_lb": -9.0, "clip_cov_ub": 9.0},
        tune=at_share("clip_cov_ratio", 0.3),
    ),
    Case("kl_cov", {"policy_loss": "kl_cov", "ppo_kl_coef": 0.7}, tune=at_share("kl_cov_ratio", 0.3)),
    Case("sft", {"loss_type": "sft_loss"}),
    Case("PPO with a critic", CLIP | {"token_advantages": "gae", "gamma": 0.98, "lambd": 0.9}, EDGES),
    Case(
        "SAO",
        {
            "policy_loss": "dis",
            "eps_clip": 0.8,
            "eps_clip_high": 3.0,
            "token_advantages": "gae",
            "gamma": 0.98,
            "lambd_length_alpha": 0.3,
            "critic_lambd": 0.9,
        },
        ratios(0.2, 4.0),
        value_clip=None,
    ),
    Case(
        "PPO with a critic, whitened, KL in the reward, no value clip, mean of means",
        {
            "token_advantages": "gae",
            "lambd": 0.95,
            "kl_coef": 0.3,
            "kl_reward_type": "k3",
            "normalize_advantages": True,
            "loss_aggregation": "sequence_mean",
        },
        value_clip=None,
    ),
    Case(
        "PPO with a critic and rewards of tokens",
        CLIP | {"advantage_estimator": "token_rewards", "token_advantages": "gae", "gamma": 0.98, "lambd": 0.9},
        EDGES,
    ),
    Case("weights by age", {"max_token_age": 5, "token_age_decay": 0.7, "use_tis": True}),
)


def objective_of(case: Case) -> Objective:
    return make_objective(AlgorithmArguments(**case.flags))


def ours(step: Step, objective: Objective, parts: Sequence[Sequence[int]] | None = None) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradient of each sequence's log-probs) of the step, divided into micro-batches of these sequences."""
    parts = parts if parts is not None else [range(len(step))]
    micro_batches = [micro_batch([step[index] for index in part]) for part in parts]
    prepared = objective.prepared([batch for _, batch in micro_batches], WholeBatch(gather=alone))
    batches = [
        (part, logprobs, batch) for part, (logprobs, _), batch in zip(parts, micro_batches, prepared, strict=True)
    ]
    return of_parts(step, batches, objective)


def of_parts(
    step: Step,
    batches: Sequence[tuple[Sequence[int], Tensor, TokenBatch]],
    loss: Callable[[Tensor, TokenBatch], LossSums],
) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradient of each sequence's leaf). ``batches``: (sequences, leaf, micro-batch)."""
    gradients: dict[int, Tensor] = {}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for _, leaf, batch in batches:
        sums = loss(leaf, batch)
        total, count = total + sums.loss, count + int(sums.count)
    (total / count).backward()
    for part, leaf, _ in batches:
        pieces = leaf.grad.split([len(step[index].old) for index in part])
        gradients |= dict(zip(part, pieces, strict=True))
    return (total / count).detach(), [gradients[index] for index in range(len(step))]


def reference(step: Step, flags: Flags) -> tuple[Tensor, list[Tensor]]:
    """The same by the references."""
    return gradients(step, "logprobs", loss_of_step(step, flags))


def gradients(step: Step, name: str, loss: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(loss, its gradients in this array of each sequence)."""
    found = torch.autograd.grad(loss, [getattr(trajectory, name) for trajectory in step], allow_unused=True)
    return loss.detach(), [
        torch.zeros_like(trajectory.old) if gradient is None else gradient
        for trajectory, gradient in zip(step, found, strict=True)
    ]


def differs(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], tolerance: float) -> str:
    """What differs by more than ``tolerance``, relative to the value, or to the largest of its kind; "" if nothing."""
    if not torch.allclose(found[0], expected[0], rtol=tolerance, atol=tolerance * 1e-3):
        return f"loss {found[0]:.9g}, expected {expected[0]:.9g}"
    largest = max(float(gradient.abs().max()) for gradient in expected[1])
    for number, (one, other) in enumerate(zip(found[1], expected[1], strict=True)):
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * min(1e-3, largest)):
            return f"gradient of sequence {number}: {one.tolist()}, expected {other.tolist()}"
    return ""


@dataclass(frozen=True, eq=False)
class Expected:
    """One random step, and what the references make of it."""

    step: Step
    flags: Flags
    policy: tuple[Tensor, list[Tensor]]
    critic: tuple[Tensor, list[Tensor]] | None


@functools.cache
def expected(case: Case, seed: int) -> Expected:
    step = case.step(seed)
    flags = case.flags | case.tune(step, seed)
    critic = None
    if flags.get("token_advantages") == "gae":
        critic = gradients(step, "values", value_loss_of_step(step, flags, case.value_clip))
    return Expected(step, flags, reference(step, flags), critic)


def disagreement(case: Case, seed: int) -> str:
    """What our code and the reference disagree about in one random step; "" if they agree."""
    other = expected(case, seed)
    objective = make_objective(AlgorithmArguments(**other.flags))
    found = differs(ours(other.step, objective), other.policy, TOLERANCE)
    if found or other.critic is None:
        return found
    return differs(ours_of_critic(other.step, objective, case.value_clip), other.critic, TOLERANCE)


def ours_of_critic(
    step: Step, objective: Objective, clip: float | None, parts: Sequence[Sequence[int]] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradient of each sequence's values) of the critic, as :func:`ours` has them of the policy."""
    critic = ValueLoss(aggregation=objective.aggregation, clip=clip)

    def loss(values: Tensor, batch: TokenBatch) -> LossSums:
        return critic(values, objective.returns(batch), batch)

    micro_batches = [
        (part, joined([step[i] for i in part], "values").requires_grad_(), micro_batch([step[i] for i in part])[1])
        for part in parts or [range(len(step))]
    ]
    return of_parts(step, micro_batches, loss)
