"""The rewards that come with the project, by the names of ``--rm-type``, and how a run gets its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from arguments.rollout import RolloutArguments
from miles_async.errors import ConfigurationError, RewardError
from miles_async.hooks import load_object
from miles_async.protocols import Reward
from miles_async.types import Prompt, Sample


async def exact_match(prompt: Prompt, sample: Sample) -> float:
    """1 if the response ended by itself and is the label, up to white space around it; else 0.

    A response that was cut at ``--rollout-max-response-len`` is never right: a model that forgets to stop
    must not be paid. Raises RewardError when the prompt has no label.
    """
    if prompt.label is None:
        raise RewardError(f"prompt {prompt.prompt_id} has no label to compare with: set --label-key")
    return float(sample.finish_reason == "stop" and sample.text.strip() == prompt.label.strip())


REWARDS: Mapping[str, Callable[[], Reward]] = {
    "exact_match": lambda: exact_match,
}
"""Name → factory, called once per process that rewards. The names are the choices of ``--rm-type``."""


class GuardedReward:
    """A Reward that takes bounded time and raises RewardError only: a bad sample must not end a run."""

    def __init__(self, reward: Reward, timeout: float) -> None:
        """``timeout``: seconds."""
        self._reward = reward
        self._timeout = timeout

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """The reward, a finite number."""
        try:
            async with asyncio.timeout(self._timeout):
                reward = float(await self._reward(prompt, sample))
        except TimeoutError as error:
            raise RewardError(f"reward took longer than --reward-timeout {self._timeout:g} s") from error
        except RewardError:
            raise
        except Exception as error:  # supervision point: the user's own code runs here
            raise RewardError(f"reward raised {error!r}") from error
        if not math.isfinite(reward):
            raise RewardError(f"reward is {reward}: one such number would spoil the weights")
        return reward


def resolve_reward(arguments: RolloutArguments) -> Reward:
    """The reward of this run, guarded: ``--custom-rm-path`` or ``--rm-type``. Raises ConfigurationError."""
    return GuardedReward(_named_reward(arguments), arguments.reward_timeout)


def _named_reward(arguments: RolloutArguments) -> Reward:
    if arguments.custom_rm_path is not None:
        reward: Reward = load_object(arguments.custom_rm_path, Reward, "--custom-rm-path")
        return reward
    if arguments.rm_type is None:
        raise ConfigurationError(
            f"no reward: give --rm-type ({', '.join(sorted(REWARDS))}) or --custom-rm-path module:attr"
        )
    if arguments.rm_type not in REWARDS:
        raise ConfigurationError(f"--rm-type {arguments.rm_type}: expected one of {', '.join(sorted(REWARDS))}")
    return REWARDS[arguments.rm_type]()
