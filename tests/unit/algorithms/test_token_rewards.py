"""Rewards of tokens, from the reward function and the environment to what ranks train on.

# covers: R10
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from miles_async.algorithms.advantages.rewards import with_reward
from miles_async.arguments import Arguments, StalenessArguments
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import RewardError
from miles_async.samples.rows import Place, TokenTexts, rows_of
from miles_async.staleness.versions import group_of
from miles_async.train_data.batch import token_advantages
from miles_async.train_data.metrics import generation_metrics
from miles_async.types import NO_VERSION, Float32, RewardParts, TokenRewards
from miles_async.wiring.decisions import make_batches
from tests.property.builders import make_attempt, make_sample

TOOL = NO_VERSION


def rewards(*values: float) -> Float32:
    return np.array(values, np.float32)


def test_what_a_reward_gives_tokens_adds_to_what_the_environment_gave() -> None:
    sample = msgspec.structs.replace(make_sample([3, TOOL, 3]), token_rewards=rewards(0, 0, 0.5, 0, 1))
    given = TokenRewards(reward=2.0, tokens=(rewards(0, 0, 1, 0, -1),))
    found = with_reward(sample, given)
    assert found.reward == 2.0
    assert found.token_rewards.tolist() == [0, 0, 1.5, 0, 0]
    assert with_reward(sample, 1.0).token_rewards is sample.token_rewards


def test_parts_of_a_reward_are_metrics_of_the_sample_and_columns_of_its_row() -> None:
    sample = msgspec.structs.replace(make_sample([3]), metadata={"metrics": {"calls": 2.0}, "turns": 1})
    found = with_reward(sample, RewardParts(reward=0.6, parts={"right": np.float32(0.5), "short": 1}))
    assert (found.reward, found.metadata["turns"]) == (0.6, 1)
    assert found.metadata["metrics"] == {"calls": 2.0, "right": 0.5, "short": 1.0}
    assert generation_metrics([found])["rollout/right/mean"] == 0.5
    place = Place(kind="eval", step=1, written_at=0.0)
    (row,) = rows_of(group_of(make_attempt(), [found]), place, TokenTexts(decode=str))
    assert row.reward_parts == '{"calls":2.0,"right":0.5,"short":1.0}'


def test_a_reward_may_use_its_array_again() -> None:
    given = rewards(0, 0, 1, 2)
    found = with_reward(make_sample([3, 3]), TokenRewards(reward=2.0, tokens=(given,)))
    given[:] = 0
    assert found.token_rewards.tolist() == [0, 0, 1, 2]


def test_each_branch_has_rewards_of_its_own() -> None:
    sample = make_sample([3, 3], more_branches=[[3]])
    found = with_reward(sample, TokenRewards(reward=0.0, tokens=(rewards(0, 0, 1, 2), rewards(0, 0, 4))))
    assert [branch.token_rewards.tolist() for branch in found.branches] == [[0, 0, 1, 2], [0, 0, 4]]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ((), "an array for each of 1 branches, found 0"),
        ((rewards(0, 0, 1),), r"one per token, shape \(5,\), found \(3,\)"),
        ((rewards(0, 0, 0, 1, 0),), "expected 0 at tokens that carry no loss .*, found another at token 3"),
        ((rewards(0, 0, np.nan, 0, 0),), "expected a finite number"),
    ],
)
def test_rewards_that_no_token_can_have_are_refused(tokens: tuple[Float32, ...], problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        with_reward(make_sample([3, TOOL, 3]), TokenRewards(reward=0.0, tokens=tokens))


@pytest.mark.parametrize("estimator", ["token_rewards", "reinforce"])
def test_ranks_get_the_rewards_of_tokens_with_the_sample_s_at_the_end(estimator: str) -> None:
    """--advantage-estimator, from the flags to the shard: other estimators look at the sample's reward alone."""
    graded = msgspec.structs.replace(make_sample([3, TOOL, 3], reward=8.0), token_rewards=rewards(0, 0, 0.5, 0, 1))
    plain = make_sample([3, 3], reward=-1.0, more_branches=[[3, TOOL]])
    arguments = replace(
        Arguments(),
        algorithm=AlgorithmArguments(advantage_estimator=estimator, token_advantages="gae"),
        staleness=StalenessArguments(max_weight_staleness=0),
    )
    (shard,) = make_batches(arguments).shards((group_of(make_attempt(), [graded, plain]),), 3)
    found = [
        token_advantages(batch)[batch.offsets[s] : batch.offsets[s + 1]].tolist()
        for (step,) in [shard.optimizer_steps]
        for batch in step
        for s in range(batch.num_branches)
    ]
    expected = {
        "token_rewards": [[0, 0, 0.5, 0, 9], [0, 0, 0, -1], [0, 0, -1, 0]],
        "reinforce": [[0, 0, 8, 0, 8], [0, 0, -1, -1], [0, 0, -1, 0]],
    }[estimator]
    assert sorted(found) == sorted(expected)
