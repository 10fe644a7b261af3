"""``--environment gymnasium:ID``: an environment of Gymnasium whose observations and actions are texts.

Its prompts are the first observations of as many seeds; an episode resets to the seed of its prompt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import gymnasium
from gymnasium.spaces import Text

from miles_async.errors import ConfigurationError, UserCodeError
from miles_async.runtime.own_thread import in_daemon_thread
from miles_async.runtime.user_code import wrong_value
from miles_async.types import AssistantTurn, JsonObject, Observation, Prompt

TextEnvironment = gymnasium.Env[str, str]
_T = TypeVar("_T")


class GymnasiumText:
    """A MakeEnvironment for one ID, and its prompts."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        """``config``: further arguments of ``gymnasium.make``. Raises ConfigurationError if it cannot be made or has
        other spaces.
        """
        self._name, self._config = name, dict(config)
        try:
            environment = self.make()
        except Exception as error:  # the user's package: whatever it raises is shown with the flag
            raise ConfigurationError(f"{type(error).__name__}: {error}") from error
        environment.close()
        for kind, space in (("observation", environment.observation_space), ("action", environment.action_space)):
            if not isinstance(space, Text):
                raise ConfigurationError(
                    f"expected Text as {kind} space, found {space}: a gymnasium.Wrapper of yours can make texts of it"
                )

    def make(self) -> TextEnvironment:
        """Make an environment, which may block. Ours are all checks of what it returns."""
        return gymnasium.make(self._name, disable_env_checker=True, **self._config)

    def rows(self, count: int, seed: int) -> Iterator[JsonObject]:
        """Yield prompts: the first observations of the seeds from ``seed`` on."""
        environment = self.make()
        try:
            for number in range(seed, seed + count):
                yield {"prompt": first_observation(environment, number), "metadata": {"seed": number}}
        finally:
            environment.close()

    def __call__(self, prompt: Prompt) -> TextEpisode:
        return TextEpisode(self, prompt)


class TextEpisode:
    """One episode. Its reward is the sum over its steps."""

    def __init__(self, maker: GymnasiumText, prompt: Prompt) -> None:
        self._maker = maker
        self._prompt = prompt
        self._environment: TextEnvironment | None = None
        self._closed = False
        self._reward = 0.0

    def tools(self) -> tuple[JsonObject, ...]:
        """None: actions are texts."""
        return ()

    async def step(self, turn: AssistantTurn) -> Observation:
        """Take the content of the turn as the action. Raises UserCodeError for what Gymnasium doesn't allow."""
        return await _in_own_thread(lambda: self._step(str(turn.message.get("content") or "")))

    async def close(self) -> None:
        """Close the environment, if a step made it or is still making it."""
        self._closed = True
        if self._environment is not None:
            await _in_own_thread(self._environment.close)

    def _step(self, action: str) -> Observation:
        environment = self._begun()
        if not environment.action_space.contains(action):
            message = f"Not an action: expected {environment.action_space}."
            return self._observed(message, done=False, invalid=True)
        observation, reward, terminated, truncated = _checked(environment.step(action))
        self._reward += reward
        return self._observed(observation, done=terminated or truncated, invalid=False)

    def _begun(self) -> TextEnvironment:
        if self._environment is None:
            self._environment = self._maker.make()
            if self._closed:  # meanwhile, since the step was given up
                self._environment.close()
                raise UserCodeError("its episode was closed while the environment was made")
            seed = self._prompt.metadata.get("seed")
            if not isinstance(seed, int):
                raise UserCodeError(f"expected a seed in the prompt's metadata (--metadata-key), found {seed!r}")
            if (found := first_observation(self._environment, seed)) != self._prompt.text:
                raise UserCodeError(
                    f"reset(seed={seed}) began with another observation than the prompt's: its seed must decide it; "
                    f"found {found[:200]!r}"
                )
        return self._environment

    def _observed(self, observation: str, *, done: bool, invalid: bool) -> Observation:
        return Observation(
            messages=({"role": "user", "content": observation},),
            done=done,
            reward=self._reward,
            metrics={"invalid_actions": float(invalid)},
        )


def first_observation(environment: TextEnvironment, seed: int) -> str:
    """Reset an environment and return its first observation. Raises UserCodeError if that is not a text."""
    returned: Any = environment.reset(seed=seed)
    match returned:
        case (str(observation), Mapping()):
            return observation
    raise wrong_value(returned, "a text and a dict of reset()")


def _checked(returned: Any) -> tuple[str, float, bool, bool]:
    match returned:
        case (str(observation), reward, terminated, truncated, Mapping()):
            try:
                number = float(reward)
            except (TypeError, ValueError):
                raise wrong_value(reward, "a number as the reward of step()") from None
            if not math.isfinite(number):
                raise wrong_value(reward, "a finite reward of step()")
            return observation, number, bool(terminated), bool(truncated)
    raise wrong_value(returned, "a text, a reward, two booleans and a dict of step()")


async def _in_own_thread(work: Callable[[], _T]) -> _T:
    """Await blocking code that may never return. A thread of a cancelled call is left behind."""
    return await asyncio.wrap_future(in_daemon_thread(work, "environment"))
