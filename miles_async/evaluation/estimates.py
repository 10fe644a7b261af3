"""Estimates from the samples of an evaluation, with 95 % intervals over prompts.

Prompts are the units that are drawn; samples of one prompt are alike, so a prompt counts once, with its mean. Miller
2024, "Adding Error Bars to Evals" (arXiv:2411.00640), gives the reasons, also for pairing by prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from miles_async.evaluation.totals import PASS, ks, pass_at_k

CONFIDENCE = 0.95
FEWEST = 5
"""Fewest prompts for an interval by Student's t."""

Rewards = Mapping[str, Sequence[float]]
"""Prompt → rewards of its samples."""

Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    low: float | None  # None: too few prompts for an interval, or all have the same value
    high: float | None
    prompts: int


def per_prompt(rewards: Rewards) -> dict[str, dict[str, float]]:
    """Metric → prompt → value: ``reward``, the mean of its samples, and ``pass@k``, for each k of the prompt with most
    samples up to its own number.
    """
    values: dict[str, dict[str, float]] = {}
    wanted = list(ks(max(map(len, rewards.values()), default=0)))
    for prompt, given in rewards.items():
        right = sum(reward >= PASS for reward in given)
        of_prompt = {"reward": float(np.mean(given))}
        of_prompt |= {f"pass@{k}": pass_at_k(len(given), right, k) for k in wanted if k <= len(given)}
        for name, value in of_prompt.items():
            values.setdefault(name, {})[prompt] = value
    return values


def estimates(rewards: Rewards) -> dict[str, Estimate]:
    """Estimate each metric of :func:`per_prompt`: rewards by Student's t, pass@k as a proportion."""
    return {
        name: (mean if name == "reward" else proportion)([*values.values()])
        for name, values in per_prompt(rewards).items()
    }


def differences(first: Rewards, second: Rewards) -> dict[str, Estimate]:
    """Second minus first of each metric, prompt by prompt, over the prompts that both have; by Student's t."""
    before, after = per_prompt(first), per_prompt(second)
    found = {}
    for name in (name for name in after if name in before):
        both = [prompt for prompt in after[name] if prompt in before[name]]
        if both:
            found[name] = mean([after[name][prompt] - before[name][prompt] for prompt in both])
    return found


def mean(values: Sequence[float]) -> Estimate:
    """The mean with Student's t interval: mean ± t · s / √n."""
    count, middle = len(values), float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count >= FEWEST else 0.0
    half = t_quantile(count - 1) * error if error else None
    low, high = (None, None) if half is None else (middle - half, middle + half)
    return Estimate(mean=middle, low=low, high=high, prompts=count)


def proportion(values: Sequence[float]) -> Estimate:
    """The mean of values from 0 to 1 with Wilson's score interval, for as many prompts as an independent yes or no
    would need to have the mean's variance (Franco, Little, Louis and Slud 2019, section 2.4).

    With one sample per prompt this is Wilson's interval. It stays within 0 and 1 and has a width if all are right.
    """
    count, middle = len(values), float(np.mean(values))
    spread = middle * (1 - middle)
    # By rounding the variance of equal values is not always 0.
    effective = count * spread / float(np.var(values)) if max(values) > min(values) else float(count)
    scale = 1 + Z**2 / effective
    center = (middle + Z**2 / (2 * effective)) / scale
    half = Z / scale * math.sqrt(max(0.0, spread) / effective + Z**2 / (4 * effective**2))
    return Estimate(mean=middle, low=max(0.0, center - half), high=min(1.0, center + half), prompts=count)


def t_quantile(freedom: int) -> float:
    """Quantile of Student's t for a two-sided interval, within 0.1 % from 4 degrees of freedom on.

    Abramowitz and Stegun 26.7.5.
    """
    z, n = Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
