"""Checks of a sample before it is rewarded, and what the trainer's data refuses should it get past that.

# covers: C12
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from miles_async.errors import ContractViolation, TransientEngineError, VersionUnknownError
from miles_async.rollout.generate import check_sample
from miles_async.staleness.versions import group_of
from miles_async.train_data.batch import tabulate
from miles_async.types import NO_VERSION, Sample
from tests.property.builders import make_attempt, make_sample

UNUSABLE = [np.nan, np.inf, -np.inf]


def with_logprob(sample: Sample, index: int, logprob: float) -> Sample:
    logprobs = sample.rollout_logprobs.copy()
    logprobs[index] = logprob
    return msgspec.structs.replace(sample, rollout_logprobs=logprobs)


@pytest.mark.parametrize("logprob", [*UNUSABLE, np.finfo(np.float32).min, 0.125])
def test_a_loss_token_needs_a_log_prob(logprob: float) -> None:
    sample = make_sample([3, 3, NO_VERSION, 3], prompt_length=2)
    check_sample(sample)
    with pytest.raises(TransientEngineError, match=r"found (nan|-?inf|-3\.40282e\+38|0\.125) \(1 of 3 tokens\)"):
        check_sample(with_logprob(sample, 3, logprob))


def test_a_log_prob_of_0_may_be_rounded() -> None:
    check_sample(with_logprob(make_sample([3]), 2, 1e-6))


def test_it_tells_the_oldest_version_of_all_branches() -> None:
    assert check_sample(make_sample([4, 3, NO_VERSION, 5])) == 3
    assert check_sample(make_sample([4, 3], more_branches=[[2, 4]])) == 2


def test_every_branch_is_checked() -> None:
    sample = make_sample([3], more_branches=[[3]])
    [branch] = sample.more_branches
    broken = msgspec.structs.replace(branch, rollout_logprobs=np.full_like(branch.rollout_logprobs, np.nan))
    with pytest.raises(TransientEngineError):
        check_sample(msgspec.structs.replace(sample, more_branches=(broken,)))


def test_arrays_of_all_branches_are_read_only() -> None:
    sample = make_sample([3], more_branches=[[3]])
    for branch in msgspec.structs.replace(sample, teacher_logprobs=np.zeros(3, np.float32)).branches:
        arrays = [value for value in msgspec.structs.asdict(branch).values() if isinstance(value, np.ndarray)]
        assert len(arrays) >= 5
        assert not any(array.flags.writeable for array in arrays)


def test_a_buffer_that_its_owner_fills_again_changes_no_sample() -> None:
    buffer, tensor = np.full(8, -1, np.float32), torch.full((3,), -1.0)
    samples = [
        msgspec.structs.replace(make_sample([3]), rollout_logprobs=logprobs)
        for logprobs in (buffer[:3], tensor.numpy())
    ]
    buffer[:] = -7
    tensor.fill_(-7)
    assert [sample.rollout_logprobs.tolist() for sample in samples] == [[-1, -1, -1]] * 2


@pytest.mark.parametrize("index", [0, 4])
def test_tokens_without_loss_may_have_any(index: int) -> None:
    """Tokens of the prompt and of a tool's output."""
    check_sample(with_logprob(make_sample([3, 3, NO_VERSION, 3], prompt_length=2), index, np.nan))


def test_a_loss_token_needs_a_version() -> None:
    with pytest.raises(VersionUnknownError):
        check_sample(make_sample([NO_VERSION]))


@pytest.mark.parametrize("logprob", UNUSABLE)
def test_a_batch_refuses_log_probs_that_got_past_the_guard(logprob: float) -> None:
    sample = make_sample([3, NO_VERSION, 3], prompt_length=2)
    advantages = np.zeros(2, np.float32)
    masked = group_of(make_attempt(), [sample, with_logprob(sample, 3, logprob)])
    tabulate([masked], advantages)
    group = group_of(make_attempt(), [sample, with_logprob(sample, 4, logprob)])
    with pytest.raises(ContractViolation, match=r".* log-prob .* samples \[1\]"):
        tabulate([group], advantages)


@pytest.mark.parametrize("advantage", UNUSABLE)
def test_a_batch_refuses_advantages_that_are_not_finite(advantage: float) -> None:
    group = group_of(make_attempt(), [make_sample([3]), make_sample([3])])
    with pytest.raises(ContractViolation, match=r".* advantage .* samples \[1\]"):
        tabulate([group], np.array([0.0, advantage], np.float32))
