"""Multi-turn generation: the model acts on an environment until one of them ends the episode (``--environment-path``).

Every turn is sampled as single-turn generation is: over any number of publications, each token with its version. What
the environment answers is tokenized and appended, and carries no loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from miles_async.algorithms.advantages.rewards import check_reward
from miles_async.api import EngineClient, Environment, MakeEnvironment, Reward
from miles_async.errors import NoRoomError, RewardError
from miles_async.rollout.generate import Began, routing_key
from miles_async.rollout.prompt_messages import conversation
from miles_async.runtime.services import Circuit
from miles_async.runtime.user_code import expect, run_user_code, wrong_value
from miles_async.trajectory.context import Turn
from miles_async.trajectory.messages import as_sent, canonical, with_kept_images
from miles_async.trajectory.taker import Limits, MakeTrajectory, TurnRequest, TurnTaker
from miles_async.types import AssistantTurn, Attempt, JsonObject, Observation, Prompt, Rewarded, Sample

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiTurnGenerate:
    """A Generate whose samples come from episodes with an environment."""

    make_environment: MakeEnvironment
    make_trajectory: MakeTrajectory
    sampling: JsonObject
    limits: Limits
    max_turns: int
    step_timeout: float  # seconds, for closing too
    service: Circuit  # that the environment needs
    began: Began = lambda key, version: None

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample:
        """Raises what the client and the environment raise; TrajectoryError for messages that have no tokens."""
        key = routing_key(attempt, sample_index)
        taker = TurnTaker(
            trajectory=self.make_trajectory(),
            client=client,
            sampling=self.sampling,
            limits=self.limits,
            routing_key=key,
            in_thread=asyncio.to_thread,
            began=partial(self.began, key),
        )
        environment = self.make_environment(attempt.prompt)
        try:
            end, metrics, rewards = await self._episode(taker, environment, attempt.prompt)
        finally:
            await self._close(environment)
        sample = await asyncio.to_thread(taker.trajectory.sample, None if end.done else "length", rewards)
        assert sample is not None, "an episode without a turn raises NoRoomError"
        return msgspec.structs.replace(sample, reward=end.reward, metadata={**sample.metadata, "metrics": metrics})

    async def _episode(
        self, taker: TurnTaker, environment: Environment, prompt: Prompt
    ) -> tuple[Observation, dict[str, float], dict[Turn, float]]:
        """The last observation, which is not ``done`` if the episode was cut, the metrics of all, and turn rewards."""
        trajectory = taker.trajectory
        messages: list[object] = [*conversation(prompt, trajectory.keep_picture)]
        tools = environment.tools()
        end, metrics, rewards = Observation(), dict[str, float](), dict[Turn, float]()
        for index in range(self.max_turns):
            try:
                # Copies: an environment may reuse its messages. As a client sends them, since they are read once more.
                sent = [as_sent(canonical(each)) for each in messages]
                turn = await taker.take(TurnRequest(messages=sent, tools=tools))
            except NoRoomError:
                if index == 0:
                    raise
                break
            end = await self._step(environment, index, turn)
            metrics |= {name: metrics.get(name, 0) + value for name, value in end.metrics.items()}
            if end.turn_reward:
                rewards[turn] = check_reward(end.turn_reward)
            if end.done:
                break
            messages += [
                as_sent(turn.reply),
                *(with_kept_images(message, trajectory.keep_image) for message in end.messages),
            ]
        return end, metrics, rewards

    async def _step(self, environment: Environment, index: int, turn: Turn) -> Observation:
        said = AssistantTurn(index=index, message=turn.reply, text=turn.text, finish_reason=turn.sampled.finish_reason)
        returned = await run_user_code(
            environment.step(said),
            seconds=self.step_timeout,
            overdue=f"a step of the environment took longer than --environment-timeout {self.step_timeout:g} s",
        )
        self.service.works()
        observation = expect(returned, Observation, "an Observation of a step of the environment")
        if not isinstance(observation.messages, tuple | list):
            raise wrong_value(observation, "an Observation with a tuple of messages")
        if not isinstance(observation.metrics, Mapping) or not all(map(_is_number, observation.metrics.values())):
            raise wrong_value(observation, "an Observation with a mapping of metrics to numbers")
        return observation

    async def _close(self, environment: Environment) -> None:
        overdue = f"took longer than --environment-timeout {self.step_timeout:g} s"
        try:
            await run_user_code(environment.close(), seconds=self.step_timeout, overdue=overdue)
        except Exception as error:  # supervision point: the episode is over, and its sample is valid
            log.warning("environment could not be closed", error=repr(error))


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0  # also an array or a tensor of one number


@dataclass(frozen=True, slots=True)
class GivenReward:
    """A Reward that keeps the reward given by an environment or agent. Cut at the length limit before it gave any, and
    without a reward of the run, a sample has earned nothing: 0.
    """

    otherwise: Reward | None  # rewards samples that have none

    async def __call__(self, prompt: Prompt, sample: Sample) -> Rewarded:
        """Raises RewardError if there is none, or one that cannot be trained on."""
        if sample.reward is None and self.otherwise is not None:
            return await self.otherwise(prompt, sample)
        if sample.reward is None and sample.finish_reason == "length":
            return 0.0
        if sample.reward is None:
            raise RewardError(
                f"prompt {prompt.prompt_id}: expected a reward of the environment or agent, found none "
                "(--rm-type or --custom-rm-path rewards samples without one)"
            )
        try:
            return check_reward(sample.reward)
        except RewardError as error:
            raise RewardError(f"prompt {prompt.prompt_id}: given by the environment or agent: {error}") from None

    async def close(self) -> None:
        if close := getattr(self.otherwise, "close", None):
            await close()
