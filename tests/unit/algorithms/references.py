"""Every algorithm a second time: plain loops over sequences and tokens in float64, written from the papers.

Nothing here calls the project's code. A reference returns the loss of a whole optimizer step.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.unit.algorithms.steps import TARGET_VERSION, Step, Trajectory, tokens_of

Flags = dict[str, Any]
TokenLosses = Callable[[Trajectory, Flags], list[Tensor]]
"""The loss at each token of a sequence, whether it carries loss or not."""


def defaults(flags: Flags) -> Flags:
    """Values of the flags that a reference reads."""
    known: Flags = {"eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05}
    known |= {"tis_mode": "truncate", "tis_level": "token", "tis_clip": 2.0, "tis_clip_low": 0.0}
    known |= {"rs_statistic": "ratio", "rs_level": "token", "rs_lower_bound": None, "rs_upper_bound": None}
    known |= {"rs_veto_threshold": None, "opsm_delta": 1e-4, "max_token_age": None, "token_age_decay": 1.0}
    known |= {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}
    known |= {"sat_quantile": 0.9, "lambd": 1.0, "gamma": 1.0, "lambd_length_alpha": None, "critic_lambd": None}
    known |= {"opd_kl_coef": 1.0, "opd_student": "trainer"}
    known |= {"prox_logp_method": "recompute", "kl_reward_type": "k1", "kl_loss_type": "k3"}
    found = known | flags
    found["by_age"] = found["max_token_age"] is not None or found["token_age_decay"] != 1
    found["above"] = found["eps_clip"] if found["eps_clip_high"] is None else found["eps_clip_high"]
    return found


def carrying(trajectory: Trajectory) -> list[int]:
    return [t for t in range(len(trajectory.mask)) if trajectory.mask[t]]


def log_ratio(logprob: Tensor, old: Tensor) -> Tensor:
    """No paper bounds it; the project does, at 20, from where on it has no gradient."""
    difference = logprob - old
    return difference if difference.item() <= 20 else torch.full_like(difference, 20.0).detach()


# ------------------------------------------------------------------------------------------------- policy losses
def clipped(ratio: Tensor, advantage: Tensor, flags: Flags) -> Tensor:
    """PPO eq. 7, and eq. 5 of the dual clip."""
    inside = torch.clamp(ratio, 1 - flags["eps_clip"], 1 + flags["above"])
    objective = torch.min(ratio * advantage, inside * advantage)
    if advantage < 0 and flags["eps_clip_c"] is not None:
        objective = torch.max(objective, flags["eps_clip_c"] * advantage)
    return -objective


def ratios(trajectory: Trajectory) -> list[Tensor]:
    """π / π_old of each token."""
    pairs = zip(trajectory.logprobs, trajectory.old, strict=True)
    return [torch.exp(log_ratio(logprob, old)) for logprob, old in pairs]


def sequence_ratios(trajectory: Trajectory) -> list[Tensor]:
    """GSPO, eq. 13 and 14: s_{i,t} = sg[s_i] · π_t / sg[π_t]."""
    tokens = carrying(trajectory)
    mean = sum(log_ratio(trajectory.logprobs[t], trajectory.old[t]).item() for t in tokens) / max(1, len(tokens))
    return [math.exp(mean) * probability / probability.detach() for probability in trajectory.logprobs.exp()]


def ppo_clip(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    return [clipped(*pair, flags) for pair in zip(ratios(trajectory), trajectory.advantages, strict=True)]


def gspo(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    return [clipped(*pair, flags) for pair in zip(sequence_ratios(trajectory), trajectory.advantages, strict=True)]


def cispo(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    losses = []
    for t in range(len(trajectory.old)):
        ratio = math.exp(log_ratio(trajectory.logprobs[t], trajectory.old[t]).item())
        weight = min(max(ratio, 1 - flags["eps_clip"]), 1 + flags["above"])
        losses.append(-weight * trajectory.advantages[t] * trajectory.logprobs[t])
    return losses


def sapo(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    losses = []
    for ratio, advantage in zip(ratios(trajectory), trajectory.advantages, strict=True):
        tau = flags["tau_pos"] if advantage > 0 else flags["tau_neg"]
        gate = 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
        losses.append(-gate * advantage)
    return losses


def gmpo(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    tokens, product = carrying(trajectory), torch.ones((), dtype=torch.float64)
    for t in tokens:
        ratio = torch.exp(log_ratio(trajectory.logprobs[t], trajectory.old[t]))
        if trajectory.advantages[t] >= 0:
            bounded = torch.min(ratio, torch.tensor(math.exp(flags["above"]), dtype=torch.float64))
        else:
            bounded = torch.max(ratio, torch.tensor(math.exp(-flags["eps_clip"]), dtype=torch.float64))
        product = product * bounded ** (1 / len(tokens))
    return [-advantage * product for advantage in trajectory.advantages]


def _dppo(trajectory: Trajectory, flags: Flags, divergence: Callable[[float, float], float]) -> list[Tensor]:
    losses = []
    for t in range(len(trajectory.old)):
        advantage = trajectory.advantages[t]
        p, q = math.exp(trajectory.logprobs[t].item()), math.exp(trajectory.old[t].item())
        distance = divergence(p, q)
        away = (advantage > 0 and p > q and distance > flags["above"]) or (
            advantage < 0 and p < q and distance > flags["eps_clip"]
        )
        ratio = min(p / q, math.exp(20))
        weight = ratio if flags["eps_clip_c"] is None else min(ratio, flags["eps_clip_c"])
        losses.append(-(0.0 if away else weight) * advantage * trajectory.logprobs[t])
    return losses


def dppo_tv(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    return _dppo(trajectory, flags, lambda p, q: abs(p - q))


def dppo_kl(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    def divergence(p: float, q: float) -> float:
        return q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))

    return _dppo(trajectory, flags, divergence)


def sft(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    """Cross entropy of a one-hot target."""
    return [torch.log(1 / probability) for probability in torch.exp(trajectory.logprobs)]


def clip_cov(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    """Eq. 12: 0 for what was chosen."""
    losses = ppo_clip(trajectory, flags)
    return [loss * (0.0 if t in flags["chosen"][id(trajectory.old)] else 1.0) for t, loss in enumerate(losses)]


def kl_cov(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    """Eq. 14."""
    losses = []
    for t, advantage in enumerate(trajectory.advantages):
        difference = log_ratio(trajectory.logprobs[t], trajectory.old[t])
        penalty = flags["ppo_kl_coef"] * torch.abs(difference) if t in flags["chosen"][id(trajectory.old)] else 0.0
        losses.append(-torch.exp(difference) * advantage + penalty)
    return losses


def covariances(step: Step) -> dict[tuple[int, int], float]:
    """Eq. 10, by sequence and token."""
    tokens = [(number, t) for number, trajectory in enumerate(step) for t in carrying(trajectory)]
    logprobs = {(number, t): float(step[number].old[t]) for number, t in tokens}
    advantages = {(number, t): float(step[number].advantages[t]) for number, t in tokens}
    mean, mean_advantage = sum(logprobs.values()) / len(tokens), sum(advantages.values()) / len(tokens)
    return {token: (logprobs[token] - mean) * (advantages[token] - mean_advantage) for token in tokens}


def lot(trajectory: Trajectory, t: int) -> float:
    """SplitMix64 over token, place and the bits of the sampled log-prob."""
    (bits,) = struct.unpack("<i", struct.pack("<f", float(trajectory.rollout[t])))
    state, whole = 0, (1 << 64) - 1
    for part in (int(tokens_of(trajectory)[t]), t, bits):
        state = ((state + part) * 0x9E3779B97F4A7C15) & whole
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & whole
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & whole
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def chosen_tokens(step: Step, flags: Flags) -> dict[int, set[int]]:
    """Tokens that Clip-Cov leaves out or KL-Cov penalizes, by the identity of each sequence's old log-probs."""
    found = covariances(step)
    if flags["policy_loss"] == "clip_cov":
        inside = [token for token, value in found.items() if flags["clip_cov_lb"] < value < flags["clip_cov_ub"]]
        inside.sort(key=lambda token: lot(step[token[0]], token[1]))
        chosen = inside[: max(1, math.floor(flags["clip_cov_ratio"] * len(found)))]
    else:
        largest = sorted(found.values(), reverse=True)[max(1, math.floor(flags["kl_cov_ratio"] * len(found))) - 1]
        chosen = [token for token, value in found.items() if value >= largest and value > 0]
    return {id(trajectory.old): {t for n, t in chosen if n == number} for number, trajectory in enumerate(step)}


def staleness_scale(step: Step, flags: Flags) -> float:
    """Eq. 3.3: inf{x: at least this share of all |d| is ≤ x}."""
    found = []
    for trajectory in step:
        tokens = carrying(trajectory)
        of_tokens = [log_ratio(trajectory.before[t], trajectory.old[t]).item() for t in tokens]
        if flags["policy_loss"] == "sat_gspo" and tokens:
            of_tokens = [sum(of_tokens) / len(tokens)] * len(tokens)
        found += [abs(one) for one in of_tokens]
    return min(x for x in found if sum(one <= x for one in found) >= flags["sat_quantile"] * len(found))


def contracted(ratio: Tensor, advantage: Tensor, flags: Flags) -> Tensor:
    """Eq. 3.2 and 3.4 to 3.6."""
    d, scale, lower, upper = math.log(ratio.item()), flags["scale"], 1.0, 1.0
    if scale > 0 and abs(d) > scale:
        lower, upper = 1 / (1 + (max(-d, 0) / scale) ** 2), 1 / (1 + (max(d, 0) / scale) ** 2)
    return clipped(ratio, advantage, flags | {"eps_clip": flags["eps_clip"] * lower, "above": flags["above"] * upper})


def sat(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    return [contracted(*pair, flags) for pair in zip(ratios(trajectory), trajectory.advantages, strict=True)]


def sat_gspo(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    return [contracted(*pair, flags) for pair in zip(sequence_ratios(trajectory), trajectory.advantages, strict=True)]


def dis(trajectory: Trajectory, flags: Flags) -> list[Tensor]:
    """f(r) is r inside, else 0."""
    losses = []
    for t, advantage in enumerate(trajectory.advantages):
        ratio = math.exp(log_ratio(trajectory.logprobs[t], trajectory.old[t]).item())
        trusted = 1 - flags["eps_clip"] < ratio < 1 + flags["above"]
        losses.append((-ratio if trusted else 0.0) * advantage * trajectory.logprobs[t])
    return losses


POLICY_LOSSES: dict[str, TokenLosses] = {
    loss.__name__: loss
    for loss in (ppo_clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl, clip_cov, kl_cov, sat, sat_gspo, dis)
}


# --------------------------------------------------------------------------------------------------- corrections
def leveled(values: list[float], level: str, trajectory: Trajectory) -> list[float]:
    """Of each token itself, or of its sequence."""
    if level == "token":
        return values
    total = sum(values[t] for t in carrying(trajectory))
    return [total if level == "sequence" else total / len(carrying(trajectory))] * len(values)


def truncated_or_masked(trajectory: Trajectory, flags: Flags) -> list[float]:
    differences = (trajectory.old - trajectory.rollout).tolist()
    weights = []
    for exponent in leveled(differences, flags["tis_level"], trajectory):
        weight = math.exp(min(exponent, 20))
        if flags["tis_mode"] == "mask":
            weights.append(weight if flags["tis_clip_low"] <= weight <= flags["tis_clip"] else 0.0)
        else:
            weights.append(min(max(weight, flags["tis_clip_low"]), flags["tis_clip"]))
    return weights


def accepted(trajectory: Trajectory, flags: Flags) -> list[float]:
    """1, or 0 where rejection sampling leaves a token out."""
    differences = (trajectory.logprobs.detach() - trajectory.rollout).tolist()
    statistic = {
        "ratio": lambda d: d,
        "k1": lambda d: -d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(min(d, 20)) - 1 - d,
    }[flags["rs_statistic"]]
    found = leveled([statistic(d) for d in differences], flags["rs_level"], trajectory)
    if flags["rs_statistic"] == "ratio":
        found = [math.exp(min(value, 20)) for value in found]
    veto = flags["rs_veto_threshold"]
    vetoed = veto is not None and any(math.exp(differences[t]) < veto for t in carrying(trajectory))
    low, high = flags["rs_lower_bound"], flags["rs_upper_bound"]
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return [float(low <= value <= high and not vetoed) for value in found]


def not_masked_by_opsm(trajectory: Trajectory, flags: Flags) -> list[float]:
    tokens = carrying(trajectory)
    now = trajectory.logprobs.detach()
    divergence = sum(float(trajectory.rollout[t] - now[t]) for t in tokens) / len(tokens)
    return [float(not (advantage < 0 and divergence > flags["opsm_delta"])) for advantage in trajectory.advantages]


def by_age(trajectory: Trajectory, flags: Flags) -> list[float]:
    oldest = math.inf if flags["max_token_age"] is None else flags["max_token_age"]
    ages = [TARGET_VERSION - version for version in trajectory.versions.tolist()]
    return [0.0 if age > oldest else flags["token_age_decay"] ** age for age in ages]


def proximal(trajectory: Trajectory) -> Trajectory:
    """A-3PO: α = 1 / d is the share of the policy that sampled a token of age d."""
    old = []
    for t, version in enumerate(trajectory.versions.tolist()):
        age = TARGET_VERSION - version
        alpha = 1.0 if age <= 1 else 1 / age
        old.append(alpha * trajectory.rollout[t] + (1 - alpha) * trajectory.logprobs[t].detach())
    return dataclasses.replace(trajectory, old=torch.stack(old))


CORRECTIONS = {
    "use_tis": truncated_or_masked,
    "use_rs": accepted,
    "use_opsm": not_masked_by_opsm,
    "by_age": by_age,
}


# --------------------------------------------------------------------------------------------------- aggregation
def token_mean(losses: Sequence[list[Tensor]], flags: Flags) -> Tensor:
    every = [loss for sequence in losses for loss in sequence]
    return torch.stack(every).sum() / len(every)


def sequence_mean(losses: Sequence[list[Tensor]], flags: Flags) -> Tensor:
    return torch.stack([torch.stack(sequence).sum() / len(sequence) for sequence in losses]).sum() / len(losses)


def sequence_sum(losses: Sequence[list[Tensor]], flags: Flags) -> Tensor:
    sums = [torch.stack(sequence).sum() / flags["loss_length_normalizer"] for sequence in losses]
    return torch.stack(sums).sum() / len(losses)


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "sequence_sum": sequence_sum}


# ----------------------------------------------------------------------------------------- advantages and the KL
def kl(name: str, d: Tensor) -> Tensor:
    """Of d = log π_ref − log π."""
    if name == "k1":
        return -d
    if name == "k2":
        return d * d / 2
    if name == "abs":
        return torch.abs(d)
    bounded = d if d.item() <= 20 else torch.full_like(d, 20.0).detach()
    k3 = torch.exp(bounded) - 1 - bounded
    return k3 if name == "k3" or k3.item() <= 10 else torch.full_like(k3, 10.0).detach()


def with_kl_in_reward(trajectory: Trajectory, flags: Flags) -> Trajectory:
    advantages = trajectory.advantages.tolist()
    costs = [
        kl(flags["kl_reward_type"], trajectory.reference[t] - trajectory.old[t]).item() for t in range(len(advantages))
    ]
    for t in range(len(advantages)):
        advantages[t] -= flags["kl_coef"] * sum(costs[later] for later in carrying(trajectory) if later >= t)
    return dataclasses.replace(trajectory, advantages=torch.tensor(advantages, dtype=torch.float64))


def distilled(trajectory: Trajectory, flags: Flags) -> Trajectory:
    """r_t = -(log π_student − log π_teacher), of the token alone, added to what the reward gave."""
    student = trajectory.rollout if flags["opd_student"] == "rollout" else trajectory.logprobs.detach()
    advantages = [
        advantage + flags["opd_kl_coef"] * (teacher - now)
        for advantage, teacher, now in zip(trajectory.advantages, trajectory.teacher, student, strict=True)
    ]
    return dataclasses.replace(trajectory, advantages=torch.stack(advantages))


def with_gae(trajectory: Trajectory, flags: Flags) -> Trajectory:
    """Eq. 16 of the paper: the sum of (γλ)^k δ, over the tokens that carry loss."""
    gamma, lambd, tokens = flags["gamma"], flags["lambd"], carrying(trajectory)
    if flags["lambd_length_alpha"] is not None and tokens:  # VAPO
        lambd = max(0.0, 1 - 1 / (flags["lambd_length_alpha"] * len(tokens)))
    deltas = []
    for place, t in enumerate(tokens):
        earns = place == len(tokens) - 1 or trajectory.per_token
        reward = trajectory.advantages[t].item() if earns else 0.0
        if flags.get("kl_coef"):
            reward -= flags["kl_coef"] * kl(flags["kl_reward_type"], trajectory.reference[t] - trajectory.old[t]).item()
        later = trajectory.old_values[tokens[place + 1]].item() if place + 1 < len(tokens) else 0.0
        deltas.append(reward + gamma * later - trajectory.old_values[t].item())
    advantages = torch.zeros_like(trajectory.advantages)
    for place, t in enumerate(tokens):
        advantages[t] = sum((gamma * lambd) ** k * delta for k, delta in enumerate(deltas[place:]))
    return dataclasses.replace(trajectory, advantages=advantages)


def whitened(step: Step) -> Step:
    every = [trajectory.advantages[t].item() for trajectory in step for t in carrying(trajectory)]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in every) / len(every) + 1e-8)
    return [
        dataclasses.replace(trajectory, advantages=(trajectory.advantages - mean) / deviation) for trajectory in step
    ]


def within_second_moment(step: Step, threshold: float) -> Step:
    """Leave out the token with the largest moment, again and again."""
    moments = {
        (number, t): float(trajectory.old[t] - trajectory.rollout[t]) ** 2
        for number, trajectory in enumerate(step)
        for t in carrying(trajectory)
    }
    while moments and sum(moments.values()) / len(moments) >= threshold:
        del moments[max(moments, key=moments.__getitem__)]
    masked = []
    for number, trajectory in enumerate(step):
        kept = torch.tensor([float((number, t) in moments) for t in range(len(trajectory.old))], dtype=torch.float64)
        masked.append(dataclasses.replace(trajectory, advantages=trajectory.advantages * kept))
    return masked


# ---------------------------------------------------------------------------------------------------- the critic
def value_loss_of_step(step: Step, flags: Flags, clip: float | None) -> Tensor:
    """The critic's loss, differentiable in every sequence's ``values``."""
    flags = defaults(flags)
    if flags["critic_lambd"] is not None:
        flags |= {"lambd": flags["critic_lambd"], "lambd_length_alpha": None}
    losses = []
    for trajectory in step:
        advantages, of_tokens = with_gae(trajectory, flags).advantages, []
        for t in carrying(trajectory):
            target, old, value = (
                advantages[t] + trajectory.old_values[t],
                trajectory.old_values[t],
                trajectory.values[t],
            )
            error = (value - target) ** 2
            if clip is not None:
                error = torch.max(error, (torch.clamp(value, float(old) - clip, float(old) + clip) - target) ** 2)
            of_tokens.append(error / 2)
        if of_tokens:
            losses.append(of_tokens)
    return AGGREGATIONS[flags.get("loss_aggregation", "token_mean")](losses, flags)


# ------------------------------------------------------------------------------------------------------- the whole
def loss_of_step(step: Step, flags: Flags) -> Tensor:
    """The loss that ``flags`` describe, differentiable in every sequence's ``logprobs``."""
    flags = defaults(flags)
    if flags.get("token_advantages") == "kl_in_reward":
        step = [with_kl_in_reward(trajectory, flags) for trajectory in step]
    if flags.get("token_advantages") == "gae":
        step = [with_gae(trajectory, flags) for trajectory in step]
    if flags.get("normalize_advantages"):
        step = whitened(step)
    if flags.get("m2_threshold") is not None:
        step = within_second_moment(step, flags["m2_threshold"])
    if flags.get("policy_loss") in ("clip_cov", "kl_cov"):
        flags["chosen"] = chosen_tokens(step, flags)
    if flags.get("policy_loss") in ("sat", "sat_gspo"):
        flags["scale"] = staleness_scale(step, flags)
    if flags.get("use_opd"):
        step = [distilled(trajectory, flags) for trajectory in step]
    of_tokens = POLICY_LOSSES[flags.get("policy_loss", "ppo_clip")]
    if flags.get("loss_type") == "sft_loss":
        of_tokens = sft
    losses = []
    for trajectory in step:
        if not trajectory.carries_loss:
            continue
        if flags["prox_logp_method"] == "loglinear":
            trajectory = proximal(trajectory)
        tokens = of_tokens(trajectory, flags)
        for flag, weights_of in CORRECTIONS.items():
            if flags.get(flag):
                weights = weights_of(trajectory, flags)
                tokens = [weight * loss for weight, loss in zip(weights, tokens, strict=True)]
        if flags.get("use_kl_loss"):
            differences = trajectory.reference - trajectory.logprobs
            divergences = [kl(flags["kl_loss_type"], d) for d in differences]
            pairs = zip(tokens, divergences, strict=True)
            tokens = [loss + flags["kl_loss_coef"] * divergence for loss, divergence in pairs]
        losses.append([tokens[t] for t in carrying(trajectory)])
    return AGGREGATIONS[flags.get("loss_aggregation", "token_mean")](losses, flags)
