"""The rewards that come with the project, by the names of ``--rm-type``, and how a run gets its own."""

from __future__ import annotations

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


def resolve_reward(arguments: RolloutArguments) -> Reward:
    """The reward of this run: ``--custom-rm-path`` or ``--rm-type``. Raises ConfigurationError."""
    if arguments.custom_rm_path is not None:
        reward: Reward = load_object(arguments.custom_rm_path, Reward, "--custom-rm-path")
        return reward
    if arguments.rm_type is None:
        raise ConfigurationError(
            f"no reward: give --rm-type ({', '.join(sorted(REWARDS))}) or --custom-rm-path module:attr"
        )
    if arguments.rm_type not in REWARDS:
        raise ConfigurationError(
            f"--rm-type {arguments.rm_type}: expected one of {', '.join(sorted(REWARDS))}"
        )
    return REWARDS[arguments.rm_type]()
