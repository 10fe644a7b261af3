"""Turn metric sums of micro-batches into the metrics of one rollout step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_async.algorithms.mismatch import mismatch_metrics
from miles_async.algorithms.spread import spread_metrics
from miles_async.algorithms.value_loss import value_metrics
from miles_async.backends.megatron.step_limits import Breach
from miles_async.bad_steps import PREFIX

MEAN = "mean/"  # prefix of sums that are reported as means over loss tokens
TOTALS = ("loss_tokens", "tokens")
MASKS = {
    "clip_fraction": "clip",
    "dual_clip_fraction": "dual_clip",
    "tis_masked_fraction": "tis",
    "rs_rejected_fraction": "rs",
    "opsm_masked_fraction": "opsm",
    "age_masked_fraction": "age",
}
"""Metric → reason, for metrics that count tokens without effect on the policy."""


ScoresOnDevice = Sequence[Tensor | None]
"""Log-probs and entropies of the tokens of a branch, [T] each."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """This rank's results of the optimizer steps of one rollout step."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # of metrics, by accumulate()
    grad_norms: list[float] = field(default_factory=list)  # of the policy's optimizer steps that were made
    lr_factors: list[float] = field(default_factory=list)  # of these, with a StepScale
    lags: list[tuple[int, int]] = field(default_factory=list)  # steps made since the batch's version, loss tokens
    critic_grad_norms: list[float] = field(default_factory=list)
    breaches: list[Breach] = field(default_factory=list)  # of steps that were skipped
    shown: dict[int, ScoresOnDevice] = field(default_factory=dict)  # branch, by position in the whole batch → scores


def accumulate(totals: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """Add sums in float64, so that the division into micro-batches does not matter.

    Names ending in ``_max`` keep the larger value; names ending in ``_log_sums`` are added under the log.
    """
    for name, value in sums.items():
        value = value.detach().double()
        if name not in totals:
            totals[name] = value
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        elif name.endswith("_log_sums"):
            totals[name] = torch.logaddexp(totals[name], value)
        else:
            totals[name] = totals[name] + value


def mean(numbers: Sequence[float]) -> float:
    """Mean; 0 if empty."""
    return sum(numbers) / max(len(numbers), 1)


def step_metrics(
    reduced: Mapping[str, Tensor], tally: Tally, *, lr: float, steps: int, seconds: float
) -> dict[str, float]:
    """``reduced``: the tally's sums over all ranks. Sums named ``MEAN`` become means over loss tokens, but ``_max``
    stays; ``loss`` is the mean over what its aggregation counts.

    ``grad_norm`` is the mean over the optimizer steps made (before clipping), ``lr`` the last step's, before
    ``lr_factor``. Loss tokens weigh ``optimizer_lag_mean``.
    """
    scalars = {name: float(values) for name, values in reduced.items() if values.ndim == 0}
    loss_tokens = max(scalars.get("loss_tokens", 0.0), 1.0)
    of_tokens = {name.removeprefix(MEAN): value for name, value in scalars.items() if name.startswith(MEAN)}
    means = {name: value if name.endswith("_max") else value / loss_tokens for name, value in of_tokens.items()}
    if "loss" in scalars:
        means["loss"] = scalars["loss"] / max(scalars["loss_count"], 1.0)
    totals = {name: scalars.get(name, 0.0) for name in TOTALS}
    masked = {f"masked_tokens/{reason}": of_tokens[name] for name, reason in MASKS.items() if name in of_tokens}
    masked["masked_tokens/no_loss"] = totals["tokens"] - totals["loss_tokens"]
    optimizer = {
        "grad_norm": mean(tally.grad_norms),
        "lr": lr,
        **({"lr_factor": mean(tally.lr_factors)} if tally.lr_factors else {}),
        "optimizer_steps": float(steps),
        "optimizer_lag_mean": sum(lag * tokens for lag, tokens in tally.lags)
        / max(sum(tokens for _, tokens in tally.lags), 1),
        "optimizer_lag_max": float(max((lag for lag, _ in tally.lags), default=0)),
        "skipped_optimizer_steps": float(steps - len(tally.grad_norms)),
        "step_seconds": seconds,
    }
    # Supervised tokens were not sampled: there is nothing to compare with.
    sampled = "mismatch_tokens" in reduced or not reduced.get("loss_tokens")
    tokens = (mismatch_metrics(reduced) | spread_metrics(reduced) if sampled else {}) | masked | value_metrics(scalars)
    return means | tokens | totals | optimizer | _bad_steps(tally.breaches)


def _bad_steps(breaches: Sequence[Breach]) -> dict[str, float]:
    """Number of steps not made, and the largest value out of bounds, by reason."""
    counts = Counter(breach.reason for breach in breaches)
    found = {f"{PREFIX}{reason}": float(count) for reason, count in counts.items()}
    for reason in counts:
        values = [breach.value for breach in breaches if breach.reason == reason]
        found[f"bad_{reason}"] = max(values, key=lambda value: math.inf if math.isnan(value) else value)
    return found
