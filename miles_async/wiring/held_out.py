"""Evaluation of a run: its held-out data sets, each with its own prompts, sampling, reward and engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec

from miles_async.arguments import Arguments, RewardArguments
from miles_async.arguments.evaluation_sets import EvaluationSet, evaluation_sets
from miles_async.engines.stack import EngineStack
from miles_async.evaluation.evaluator import DataSet, Evaluator
from miles_async.prompts.templates import ChatTemplate
from miles_async.rollout.generate import sampling_parameters
from miles_async.runtime.services import Services
from miles_async.samples.recorder import SampleRecorder
from miles_async.types import JsonObject, Prompt
from miles_async.wiring.engines import RunEngines
from miles_async.wiring.generation import Episodes, RunReward, resolve_run_reward
from miles_async.wiring.run_prompts import open_source


class RunRewards:
    """The rewards of training and of held-out data sets; data sets with the same flags share one."""

    def __init__(self, arguments: Arguments, services: Services) -> None:
        """Make the reward of training. Raises ConfigurationError."""
        self._arguments = arguments
        self._services = services
        self._rewards: dict[RewardArguments, RunReward] = {}
        self.training = self.of(arguments.rewards)

    def of(self, flags: RewardArguments) -> RunReward:
        """The reward of these flags. Raises ConfigurationError."""
        if flags not in self._rewards:
            self._rewards[flags] = resolve_run_reward(replace(self._arguments, rewards=flags), self._services)
        return self._rewards[flags]

    async def close(self) -> None:
        """Close every reward, even if one raises; this ends the processes they started."""
        async with AsyncExitStack() as stack:
            for reward in self._rewards.values():
                stack.push_async_callback(reward.close)


def make_evaluator(
    arguments: Arguments,
    engines: RunEngines,
    template: ChatTemplate,
    episodes: Episodes,
    rewards: RunRewards,
    services: Services,
    samples: SampleRecorder | None,
) -> Evaluator | None:
    """Open the held-out prompts. None without any. Raises ConfigurationError, DataError."""
    held_out = evaluation_sets(arguments.evaluation)
    if not held_out:
        return None
    rollout = sampling_parameters(arguments.rollout)
    data_sets: Mapping[str, DataSet] = {
        each.name: DataSet(
            prompts=_prompts(open_source(arguments, template, held_out=each).all_prompts, each.metadata_overrides),
            client=_stack(each, engines).client,
            generate=episodes.generate(
                {**rollout, **each.sampling(arguments.evaluation, arguments.rollout)}, trained=False
            ),
            reward=rewards.of(each.rewards(arguments.rewards)).single,
            group_reward=episodes.group_reward(rewards.of(each.rewards(arguments.rewards))),
            n_samples=each.samples(arguments.evaluation),
        )
        for each in held_out
    }
    return Evaluator(
        data_sets,
        concurrency=arguments.evaluation.eval_concurrency,
        service=episodes.circuit,
        services=services,
        stall_timeout=arguments.observability.stall_timeout,
        record=samples.evaluation if samples else None,
    )


def _stack(held_out: EvaluationSet, engines: RunEngines) -> EngineStack:
    return engines.train if held_out.engines == "train" else engines.evaluation or engines.train


def _prompts(prompts: Callable[[], Iterator[Prompt]], overrides: JsonObject) -> Callable[[], Iterable[Prompt]]:
    if not overrides:
        return prompts
    return lambda: (msgspec.structs.replace(prompt, metadata={**prompt.metadata, **overrides}) for prompt in prompts())
