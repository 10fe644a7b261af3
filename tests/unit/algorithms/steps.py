"""Random optimizer steps, as lists of sequences for references and as micro-batches for our code, in float64.

They hold what is rare in a run: sequences of one token, tokens and whole micro-batches without loss, advantages of 0,
ratios of e^-20 and a hair beside e^20 (at it, versions of PyTorch have other gradients), and ratios a hair beside every
bound that ``edges`` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from miles_async.api import TokenBatch

TARGET_VERSION = 9
HAIR = 1e-4  # less than the error that a mutant puts into a formula


@dataclass(frozen=True)
class Trajectory:
    """One sequence: arrays [T]."""

    logprobs: Tensor  # by the policy that is trained; a leaf with gradient
    old: Tensor
    rollout: Tensor
    reference: Tensor
    teacher: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    versions: Tensor  # int64
    values: Tensor  # by the critic that is trained; a leaf with gradient
    old_values: Tensor
    before: Tensor  # log-probs by the trainer before its first optimizer step, whatever ``old`` is
    per_token: bool = False  # as in TokenBatch

    @property
    def carries_loss(self) -> bool:
        return bool(self.mask.any())


Step = list[Trajectory]

Floats = npt.NDArray[np.float64]

Edges = Callable[[Floats, Floats], Floats]
"""(log π_old [T], factors near 1 [T]) → log-ratios [K, T], at which a formula changes its form where factors are 1."""


def no_edges(old: Floats, factors: Floats) -> Floats:
    return np.zeros((0, len(old)))


def ratios(*bounds: float) -> Edges:
    """Bounds of the ratio."""

    def edges(old: Floats, factors: Floats) -> Floats:
        return np.log(np.multiply.outer(bounds, factors))

    return edges


def divergences(of: Callable[[Floats, Floats], Floats], *, below: float, above: float) -> Edges:
    """Bounds of a divergence ``of(p, q)`` for p < q and for p > q. It grows with the distance of p from q."""

    def edges(old: Floats, factors: Floats) -> Floats:
        q, found = np.exp(old), []
        for bound, end in ((below, 1e-12), (above, 1.0 - 1e-12)):
            near, far = q, np.full_like(q, end)
            for _ in range(60):
                middle = (near + far) / 2
                inside = of(middle, q) < bound * factors
                near, far = np.where(inside, middle, near), np.where(inside, far, middle)
            found.append(np.log(near) - old)
        return np.array(found)

    return edges


Adjust = Callable[[Trajectory, float], Trajectory]
"""Puts a whole sequence at an edge, if the factor is 1."""


def unadjusted(trajectory: Trajectory, factor: float) -> Trajectory:
    return trajectory


def mean_log_ratio(bound: float) -> Adjust:
    """mean(log π - log π_rollout) over the tokens that carry loss."""

    def adjust(trajectory: Trajectory, factor: float) -> Trajectory:
        difference = trajectory.logprobs.detach() - trajectory.rollout
        shift = difference[trajectory.mask].mean() - bound * factor
        return dataclasses.replace(trajectory, rollout=trajectory.rollout + shift)

    return adjust


def sum_of_k2(bound: float) -> Adjust:
    """sum((log π - log π_rollout)² / 2) over the tokens that carry loss."""

    def adjust(trajectory: Trajectory, factor: float) -> Trajectory:
        now = trajectory.logprobs.detach()
        difference = now - trajectory.rollout
        scale = (bound * factor / (difference[trajectory.mask].square() / 2).sum()).sqrt()
        return dataclasses.replace(trajectory, rollout=now - scale * difference)

    return adjust


def random_step(seed: int, edges: Edges = no_edges, adjust: Adjust = unadjusted) -> Step:
    """``edges``: tokens are put a hair beside each. ``adjust``: so is every second sequence."""
    draw = np.random.default_rng(seed)
    step = [_trajectory(draw, length, edges, number) for number, length in enumerate((1, 5, 9, 1, 14, 6, 3, 11))]
    for number in (0, 2, 4, 6):
        step[number] = adjust(step[number], 1.0 + HAIR * draw.choice([-1.0, 1.0]))
    return step


def _trajectory(draw: np.random.Generator, length: int, edges: Edges, number: int) -> Trajectory:
    def floats(values: object) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.float64)

    old = -draw.exponential(1.5, length) - 0.05
    old = np.where(draw.random(length) < 0.2, old - 21.0, old)  # so that ratios of e^20 can be had
    old_to_rollout, now_to_old = _log_ratios(draw, old, edges), _log_ratios(draw, old, edges)
    # Half of the tokens have an edge between the engine's policy and the old one, half between it and the present one.
    now = _below_0(old + now_to_old)
    rollout = _below_0(np.where(draw.random(length) < 0.5, old, now) - old_to_rollout)
    # One advantage per sequence, as group estimators give; some are 0, and in every third sequence tokens differ.
    advantages = np.full(length, draw.choice([0.0, *draw.normal(size=4)]))
    if number % 3 == 2:
        advantages = advantages + draw.normal(size=length) * draw.integers(0, 2, length)
    [of_critic] = draw.spawn(1)
    values = of_critic.normal(size=length)
    [of_trainer] = draw.spawn(1)
    near = old + (now - old) * (1.0 + HAIR * of_trainer.choice([-1.0, 1.0], length))
    before = _below_0(np.where(of_trainer.random(length) < 0.8, near, now + of_trainer.normal(size=length) * 0.1))
    mask = draw.random(length) < 0.8
    if number == 5:
        mask[:] = False
    elif not mask.any():
        mask[0] = True
    return Trajectory(
        logprobs=floats(now).requires_grad_(),
        old=floats(old),
        rollout=floats(rollout),
        reference=floats(old + draw.normal(size=length) * draw.choice([0.1, 4.0])),
        teacher=floats(_below_0(rollout + np.random.default_rng(number).normal(size=length))),
        advantages=floats(advantages),
        mask=torch.tensor(mask),
        versions=torch.tensor(draw.integers(0, TARGET_VERSION + 1, length)),
        values=floats(values + of_critic.normal(size=length) * of_critic.choice([0.05, 1.0])).requires_grad_(),
        old_values=floats(values),
        before=floats(before),
    )


def _below_0(logprobs: Floats) -> Floats:
    return np.minimum(logprobs, -1e-3)


def _log_ratios(draw: np.random.Generator, old: Floats, edges: Edges) -> Floats:
    """Small ones, one in three at an edge, a few extreme ones."""
    length = len(old)
    found = draw.normal(size=length) * draw.choice([0.02, 0.3, 1.0])
    beside = edges(old, 1.0 + HAIR * draw.choice([-1.0, 1.0], length))
    if len(beside):
        chosen = beside[draw.integers(0, len(beside), length), np.arange(length)]
        found = np.where(draw.random(length) < 1 / 3, chosen, found)
    return np.where(draw.random(length) < 0.12, draw.choice([-20.0, 19.99, 20.01], length), found)


def tokens_of(trajectory: Trajectory) -> Tensor:
    """int64 [T]: the same wherever the sequence is."""
    return trajectory.versions * 1000 + len(trajectory.old)


def joined(step: Step, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """An array of all sequences, as a new leaf."""
    parts = [getattr(trajectory, name).detach() for trajectory in step]
    return torch.cat(parts).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def micro_batch(step: Step, dtype: torch.dtype = torch.float64) -> tuple[Tensor, TokenBatch]:
    """(log-probs as a new leaf, the batch), the sequences behind one another; tokens without loss hold nonsense."""
    lengths = [len(trajectory.old) for trajectory in step]
    versions = [trajectory.versions for trajectory in step]

    mask = joined(step, "mask", dtype)
    batch = TokenBatch(
        tokens=torch.cat([torch.zeros(0, dtype=torch.int64), *map(tokens_of, step)]),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=mask,
        advantages=joined(step, "advantages", dtype) * mask,
        per_token=any(trajectory.per_token for trajectory in step),
        rewards=torch.zeros(len(step), dtype=dtype),
        group_ids=torch.zeros(len(step), dtype=torch.int64),
        rollout_logprobs=joined(step, "rollout", dtype),
        weight_versions=torch.cat(versions) if versions else torch.zeros(0, dtype=torch.int64),
        oldest_versions=torch.cat([v.min().expand(len(v)) for v in versions])
        if versions
        else torch.zeros(0, dtype=torch.int64),
        target_version=TARGET_VERSION,
        computed={
            "old_logprobs": joined(step, "old", dtype),
            "trainer_logprobs": joined(step, "before", dtype),
            "ref_logprobs": joined(step, "reference", dtype),
            "teacher_logprobs": joined(step, "teacher", dtype),
            "values": joined(step, "old_values", dtype),
        },
    )
    return joined(step, "logprobs", dtype).requires_grad_(), batch
