"""The clipped surrogate with its dual clip, and its gradient, against the formula in float64 (one branch at a time).

# covers: C12
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles_async.algorithms.objective import make_objective
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.fakes.token_batches import token_batch

LOGPROBS = st.floats(-20, 0, width=32)
ADVANTAGES = st.just(0.0) | st.floats(-4, 4, width=32)


@dataclass(frozen=True)
class Token:
    logprob: float
    old: float
    advantage: float


TOKENS = st.lists(st.builds(Token, LOGPROBS, LOGPROBS, ADVANTAGES), min_size=1, max_size=8)


def reference(token: Token, low: float, high: float, cap: float) -> tuple[float, float]:
    """(loss, its derivative by the log-prob), by the cases of Ye et al. 2020 (arXiv 1912.09729), section 3.5.

    The derivative of the ratio is the ratio itself; where the clip decides there is none.
    """
    ratio, advantage = math.exp(token.logprob - token.old), token.advantage
    if advantage >= 0:
        return (-high * advantage, 0.0) if ratio > high else (-ratio * advantage, -ratio * advantage)
    if ratio < low:
        return -low * advantage, 0.0
    return (-cap * advantage, 0.0) if ratio > cap else (-ratio * advantage, -ratio * advantage)


@given(TOKENS, st.sampled_from([0.1, 0.2]), st.sampled_from([0.2, 0.28]), st.sampled_from([1.5, 3.0, 10.0]))
def test_surrogate_and_gradient_equal_the_formula(tokens: list[Token], low: float, high: float, cap: float) -> None:
    arguments = AlgorithmArguments(eps_clip=low, eps_clip_high=high, eps_clip_c=cap, use_rollout_logprobs=True)
    logprobs = torch.tensor([token.logprob for token in tokens], requires_grad=True)
    batch = token_batch(old=[token.old for token in tokens], advantages=[token.advantage for token in tokens])
    total = make_objective(arguments)(logprobs, batch).loss
    total.backward()
    edges = (1 - low, 1 + high, cap)
    expected = [reference(token, *edges) for token in tokens]
    assert total.item() == pytest.approx(sum(loss for loss, _ in expected), rel=1e-5, abs=1e-5)
    for token, found, (_, gradient) in zip(tokens, logprobs.grad.tolist(), expected, strict=True):
        ratio = math.exp(token.logprob - token.old)
        if all(abs(ratio - edge) > 1e-4 * edge for edge in edges):  # rounding decides at an edge
            assert found == pytest.approx(gradient, rel=1e-5, abs=1e-6)
        assert abs(found) <= max(1 + high, cap) * abs(token.advantage) * 1.001  # whatever the ratio
