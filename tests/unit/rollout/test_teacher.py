"""A teacher's log-probs go to the tokens that carry loss, in every branch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from miles_async.errors import ServiceOutageError
from miles_async.rollout.teacher import Teacher
from miles_async.runtime.services import Circuit
from miles_async.types import NO_VERSION, Float32
from tests.property.builders import make_sample


async def minus(tokens: Sequence[int], first: int) -> Float32:
    """Each token's own number, negative."""
    return -np.array(tokens[first:], np.float32)


async def test_every_branch_is_scored_from_its_first_token_with_loss() -> None:
    asked: list[tuple[int, int]] = []

    async def score(tokens: Sequence[int], first: int) -> Float32:
        asked.append((len(tokens), first))
        return await minus(tokens, first)

    sample = make_sample([5, NO_VERSION, 5], prompt_length=3, first_token=1, more_branches=[[5]])
    taught = await Teacher(score, Circuit("teacher"))(sample)
    assert sorted(asked) == [(4, 3), (6, 3)]
    for before, after in zip(sample.branches, taught.branches, strict=True):
        assert after.teacher_logprobs is not None
        assert after.teacher_logprobs.dtype == np.float32
        assert after.teacher_logprobs.tolist() == (-1.0 * before.tokens * before.loss_mask).tolist()


async def test_nothing_predicts_the_first_token_of_all() -> None:
    sample = make_sample([5, 5], prompt_length=0, first_token=1)
    taught = await Teacher(minus, Circuit("teacher"))(sample)
    assert taught.teacher_logprobs is not None
    assert taught.teacher_logprobs.tolist() == [0.0, -2.0]


@pytest.mark.parametrize("nonsense", [np.nan, -3.4e38])
async def test_numbers_that_are_no_log_probs_are_the_teacher_s_failure(nonsense: float) -> None:
    # covers: C12
    async def score(tokens: Sequence[int], first: int) -> Float32:
        return np.full(len(tokens) - first, nonsense, np.float32)

    circuit = Circuit("teacher", outage_timeout=0.0)
    with pytest.raises(ServiceOutageError, match="numerics are broken"):
        await Teacher(score, circuit)(make_sample([5]))
