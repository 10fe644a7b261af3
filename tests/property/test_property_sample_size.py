"""Effective sample sizes, as the trainer adds them up, against decimals without bounds: weights are anywhere.

# covers: C12, M3
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal, localcontext

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from miles_async.algorithms.step_scale import LOG_SUMS, StepScale
from miles_async.backends.megatron.metrics import accumulate
from tests.fakes.token_batches import token_batch

MANY_DIGITS = Context(prec=60, Emax=10**9, Emin=-(10**9))
LOG_RATIOS = st.integers(-3 * 64, 3 * 64).map(lambda number: number / 64)  # of a token; sums of them are exact
LONG_WAY = st.sampled_from([0.0, -330.0, 32.0, -5000.0, 5000.0])  # of the policy, by which all sequences have moved


def sequences_of(count: int) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(LOG_RATIOS, min_size=1, max_size=3), min_size=count, max_size=count)


STEPS = st.lists(st.integers(0, 4).flatmap(sequences_of), min_size=1, max_size=4).filter(any)  # of micro-batches
MASKED = st.booleans()


def reference(log_weights: Sequence[float]) -> float:
    """(Σ w)² / (B Σ w²)"""
    with localcontext(MANY_DIGITS):
        weights = [Decimal(log).exp() for log in log_weights]
        squares = sum(weight * weight for weight in weights)
        return float(sum(weights) ** 2 / (squares * len(weights)))


@given(STEPS, LONG_WAY, MASKED, st.sampled_from([1.0, 0.5]))
def test_the_share_of_an_optimizer_step_is_that_of_its_sequences(
    step: list[list[list[float]]], moved: float, masked: bool, full_share: float
) -> None:
    """``masked``: there is one more sequence, without loss."""
    scale, found = StepScale(power=1.0, full_share=full_share), dict[str, Tensor]()
    for sequences in step:
        sequences = [[ratios[0] + moved, *ratios[1:]] for ratios in sequences]
        flat = [ratio for sequence in sequences for ratio in sequence]
        extra = [9.0] if masked else []
        if not flat + extra:
            continue
        batch = token_batch(
            old=flat + extra,
            rollout=[0.0] * len(flat + extra),
            advantages=[1.0] * len(flat + extra),
            mask=[1.0] * len(flat) + [0.0] * len(extra),
            lengths=[*map(len, sequences), *map(len, [extra] if extra else [])],
        )
        accumulate(found, scale.sums(batch.old_logprobs, batch))
    expected = reference([sum(sequence) + moved for sequences in step for sequence in sequences])
    factor = scale.factor(torch.as_tensor(found[LOG_SUMS]))
    assert factor == pytest.approx(min(1.0, expected / full_share), rel=1e-9)
