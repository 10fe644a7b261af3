"""Metrics of tokens against numpy in float64: by age and by turn, quantiles, effective sample sizes, spread.

# covers: M3, O5
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_async.algorithms import mismatch, spread
from miles_async.algorithms.histogram import MIDDLES, magnitudes, quantile
from miles_async.algorithms.mismatch import mismatch_metrics, mismatch_sums, turns_of
from miles_async.algorithms.objective import make_objective
from miles_async.algorithms.spread import spread_metrics, spread_sums
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.backends.megatron.metrics import accumulate
from tests.fakes.token_batches import token_batch
from tests.unit.algorithms.formula_errors import unnoticed
from tests.unit.algorithms.steps import TARGET_VERSION, Step, Trajectory, micro_batch, random_step

SEEDS = range(4)
GROUPS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3": (3, 3), "4-7": (4, 7), "8-15": (8, 15), "16+": (16, 10**9)}
TURN_NAMES = dict(zip(GROUPS, ("1", "2", "3", "4", "5-8", "9-16", "17+"), strict=True))
RESOLUTION = 0.05


def added(all_sums: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of several micro-batches, as the trainer adds them."""
    found: dict[str, Tensor] = {}
    for sums in all_sums:
        accumulate(found, sums)
    return found


def ours(step: Step, parts: Sequence[Sequence[int]]) -> dict[str, float]:
    sums = []
    for part in parts:
        logprobs, batch = micro_batch([step[index] for index in part])
        sums.append({**mismatch_sums(batch.old_logprobs, batch), **spread_sums(logprobs, batch)})
    total = added(sums)
    return mismatch_metrics(total) | spread_metrics(total)


def turns_by_hand(mask: Sequence[bool]) -> list[int]:
    found, turn = [], -1
    for index, carries in enumerate(mask):
        if carries and (index == 0 or not mask[index - 1]):
            turn += 1
        found.append(max(turn, 0))
    return found


def reference(step: Step) -> dict[str, float]:
    def flat(of: str) -> np.ndarray:
        return np.concatenate([getattr(one, of).detach().numpy()[one.mask.numpy()] for one in step])

    log_ratio = flat("old") - flat("rollout")
    ages = TARGET_VERSION - flat("versions")
    turns = np.concatenate([np.array(turns_by_hand(one.mask.tolist()))[one.mask.numpy()] for one in step])
    found: dict[str, float] = {}
    k3 = np.exp(np.minimum(log_ratio, 20)) - 1 - log_ratio
    for positions, prefix in ((ages, "age"), (turns, "turn")):
        for name, (first, last) in GROUPS.items():
            inside = (positions >= first) & (positions <= last)
            if not inside.any():
                continue
            label = f"{prefix}_{name if prefix == 'age' else TURN_NAMES[name]}"
            absolute = np.abs(log_ratio[inside])
            found[f"logprob_diff/{label}/tokens"] = inside.sum()
            found[f"logprob_diff/{label}/mean"] = absolute.mean()
            found[f"logprob_diff/{label}/max"] = absolute.max()
            found[f"logprob_diff/{label}/p99"] = np.quantile(absolute, 0.99, method="inverted_cdf")
            if prefix == "age":
                found[f"rollout_kl_k3/{label}"] = k3[inside].mean()

    fresh = np.concatenate([(one.versions.min() == TARGET_VERSION).expand(int(one.mask.sum())) for one in step])
    found["logprob_diff_tokens"] = fresh.sum()
    found["logprob_diff_mean"] = np.abs(log_ratio[fresh]).mean()
    found["logprob_diff_max"] = np.abs(log_ratio[fresh]).max()
    found["rollout_kl"], found["rollout_kl_k3"] = -log_ratio.mean(), k3.mean()

    def ess(log_weights: np.ndarray) -> float:
        weights = np.exp(log_weights - log_weights.max())
        return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))

    products = [float((one.old - one.rollout)[one.mask].sum()) for one in step if one.carries_loss]
    found["ess"] = ess(log_ratio)
    found["ess_sequences"] = ess(np.array(products))
    advantages, ratio = flat("advantages"), np.exp(np.minimum(flat("logprobs") - flat("old"), 20))
    found["advantage_mean"], found["advantage_std"] = advantages.mean(), advantages.std()
    found["advantage_abs_max"] = np.abs(advantages).max()
    found["masked_tokens/zero_advantage"] = (advantages == 0).sum()
    found["sequences"] = sum(one.carries_loss for one in step)
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        found[f"ratio_{name}"] = np.quantile(ratio, share, method="inverted_cdf")
    return found


def differences(step: Step, parts: Sequence[Sequence[int]]) -> list[str]:
    """Metrics that are not what they should be."""
    found, expected = ours(step, parts), reference(step)
    wrong = [name for name in found if name not in expected and name.startswith(("logprob_diff/", "rollout_kl_k3/"))]
    for name, value in expected.items():
        if "/p99" in name:
            right = found[name] == pytest.approx(value, rel=RESOLUTION)
        elif name.startswith("ratio_"):
            right = np.log(found[name]) == pytest.approx(np.log(value), rel=RESOLUTION, abs=1e-6)
        else:
            right = found[name] == pytest.approx(value, rel=1e-9, abs=1e-12)
        wrong += [] if right else [name]
    return wrong


def aged(step: Step, seed: int) -> Step:
    """Versions as old as 20, and a sequence with many turns."""
    draw = np.random.default_rng(seed)
    step = [
        dataclasses.replace(one, versions=TARGET_VERSION - torch.tensor(draw.integers(0, 21, len(one.old))))
        for one in step
    ]
    length = 40
    values = torch.tensor(draw.normal(-2.0, 0.5, (4, length)))
    return [
        *step,
        Trajectory(
            logprobs=values[0].requires_grad_(),
            old=values[1],
            rollout=values[2],
            reference=values[1],
            teacher=values[1],
            advantages=values[3],
            mask=torch.arange(length) % 2 == 1,
            versions=torch.full((length,), TARGET_VERSION),
            values=values[1],
            old_values=values[1],
            before=values[1],
        ),
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "parts", [[range(9)], [[0], [1], [2], [3], [4], [5], [6], [7], [8]], [[8, 5, 0], [], [7, 1], [2, 3, 4, 6]]]
)
def test_metrics_equal_numpy_however_sequences_are_packed(seed: int, parts: Sequence[Sequence[int]]) -> None:
    assert differences(aged(random_step(seed), seed), parts) == []


COARSE, PRESENCE = "below a bin's width", "only whether it is 0 counts"
HARMLESS = {
    **dict.fromkeys(
        (
            "0.99",
            "quantile(counts[index], 0.99)",
            "min(quantile(counts[index], 0.99), largest[index])",
            "quantile(counts, share, SIGNED_MIDDLES)",
            "magnitudes(difference, mask, groups, len(AGES))",
            "difference",  # of magnitudes()
            "mask",  # the same
        ),
        COARSE,
    ),
    **dict.fromkeys(
        (
            "tokens",
            "count",
            "1.0",
            "absolute",  # for its type
            "values",  # the same
            'reduced["turns_sums"][1:, 0].sum()',
            'float(reduced["turns_sums"][1:, 0].sum())',
        ),
        PRESENCE,
    ),
}
"""Expressions that may be wrong by a thousandth somewhere without a consequence → the reason."""


@pytest.mark.parametrize("module", [mismatch, spread], ids=["mismatch", "spread"])
def test_an_error_of_a_thousandth_is_noticed(module: ModuleType) -> None:
    steps = [aged(random_step(seed), seed) for seed in SEEDS]

    def agrees() -> bool:
        return not any(differences(step, [range(9)]) for step in steps)

    assert sorted(set(unnoticed(module, agrees, metrics=True)) - HARMLESS.keys()) == []


def test_turns_are_stretches_that_carry_loss_and_begin_again_in_every_sequence() -> None:
    batch = token_batch(
        old=[0.0] * 9, advantages=[0.0] * 9, mask=[0.0, 1, 1, 0, 1, 1, 1, 0, 1], lengths=[5, 1, 3]
    )  # fmt: skip
    assert turns_of(batch).tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_one_turn_is_not_told_apart() -> None:
    batch = token_batch(old=[-1.0, -2.0], advantages=[1.0, 1.0], rollout=[-1.5, -2.0])
    metrics = mismatch_metrics(mismatch_sums(batch.old_logprobs, batch))
    assert metrics["logprob_diff/age_0/max"] == 0.5
    assert not any("turn" in name for name in metrics)


def test_equal_weights_have_the_whole_batch_as_effective_sample() -> None:
    batch = token_batch(old=[-1.0, -2.0, -1.0], advantages=[1.0] * 3, lengths=[2, 1])
    metrics = mismatch_metrics(mismatch_sums(batch.old_logprobs, batch))
    assert metrics["ess"] == metrics["ess_sequences"] == 1.0


def test_a_batch_without_loss_has_no_such_metrics() -> None:
    assert mismatch_metrics({}) == {
        "rollout_kl": 0, "rollout_kl_k3": 0, "logprob_diff_tokens": 0, "logprob_diff_mean": 0, "logprob_diff_max": 0
    }  # fmt: skip
    assert spread_metrics({}) == {}


@pytest.mark.parametrize("value", [0.0, 3e-6, 0.011, 1.0, 19.0])
def test_a_quantile_is_right_within_a_twentieth(value: float) -> None:
    values = torch.tensor([value, -value, value])
    (counts,) = magnitudes(values, torch.ones(3), torch.zeros(3, dtype=torch.int64), 1).tolist()
    assert quantile(counts, 0.5) == pytest.approx(value, rel=RESOLUTION)
    assert quantile([0.0] * len(MIDDLES), 0.5) == 0


def test_what_carries_no_loss_is_in_no_metric() -> None:
    def metrics(batch: TokenBatch) -> dict[str, float]:
        sums = added([mismatch_sums(batch.old_logprobs, batch), spread_sums(batch.old_logprobs, batch)])
        return mismatch_metrics(sums) | spread_metrics(sums)

    whole = token_batch(old=[-1.0, -2.0, 0.0], rollout=[-1.2, -2.5, -9.0], advantages=[1.0, -1.0, 0.0], mask=[1, 1, 0])
    part = token_batch(old=[-1.0, -2.0], rollout=[-1.2, -2.5], advantages=[1.0, -1.0])
    assert metrics(whole) == pytest.approx(metrics(part))


def test_advantages_are_those_of_the_loss_with_a_teacher_s_part() -> None:
    """Without a reward all of the advantage is the teacher's: no token counts as one without."""
    objective = make_objective(AlgorithmArguments(advantage_estimator="on_policy_distillation", use_opd=True))
    batch = token_batch(old=[-1.0, -2.0], advantages=[0.0, 0.0])
    batch = batch.with_computed("teacher_logprobs", torch.tensor([-0.5, -3.0]))
    seen = objective(batch.old_logprobs, batch).batch
    metrics = spread_metrics(spread_sums(batch.old_logprobs, seen))
    assert metrics["masked_tokens/zero_advantage"] == 0
    assert metrics["advantage_abs_max"] == 1.0
