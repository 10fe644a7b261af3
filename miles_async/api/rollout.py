"""Protocols of the rollout side: generation, environments, agents, rewards, filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from miles_async.types import (
    AssistantTurn,
    Attempt,
    GenerateRequest,
    Generation,
    Group,
    JsonObject,
    Observation,
    Prompt,
    Rewarded,
    Sample,
)


class EngineClient(Protocol):
    """Token-in-token-out generation through the router."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Carry out one generation call, with retries of transient errors within the client's budget.

        Raises TransientEngineError when the budget is spent, RequestRejectedError, VersionUnknownError.
        An abort is a Generation with finish_reason "abort" and partial output, not an exception.
        """
        ...


@runtime_checkable
class Generate(Protocol):
    """``--custom-generate-function-path module:attr``: one trajectory of one prompt.

    >>> from miles_async.rollout.generate import build_sample, routing_key
    >>> from miles_async.trajectory.turn import take_turn
    >>> async def four_tokens(client, attempt, sample_index):
    ...     request = GenerateRequest(
    ...         input_ids=np.array(attempt.prompt.token_ids, np.int32),
    ...         sampling={"temperature": 1.0, "max_new_tokens": 4},
    ...         routing_key=routing_key(attempt, sample_index),  # one per sample: its prefix stays in one engine
    ...     )
    ...     turn = await take_turn(client, request)
    ...     return build_sample(attempt.prompt, turn, text=" ".join(map(str, turn.output_ids)))
    >>> asyncio.run(four_tokens(client, attempt, 0)).text
    '7 8 9 2'
    """

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample: ...


@runtime_checkable
class Environment(Protocol):
    """An environment that the model acts on. Every episode gets its own object, so there is nothing to reset; the
    object is closed however the episode ends.

    >>> class GuessTheNumber:
    ...     def __init__(self, prompt):
    ...         self.number = int(prompt.label)
    ...
    ...     def tools(self):
    ...         return ()
    ...
    ...     async def step(self, turn):
    ...         if int(turn.text) == self.number:
    ...             return Observation(done=True, reward=1.0)
    ...         hint = "more" if int(turn.text) < self.number else "less"
    ...         return Observation(messages=({"role": "user", "content": hint},), reward=0.0)
    ...
    ...     async def close(self): ...
    >>> asyncio.run(GuessTheNumber(prompt).step(turn)).messages
    ({'role': 'user', 'content': 'less'},)
    """

    def tools(self) -> Sequence[JsonObject]:
        """Functions that the model may call, as chat completions describe them; () for none."""
        ...

    async def step(self, turn: AssistantTurn) -> Observation:
        """Answer the model's turn. Whatever it raises costs its attempt, not the run. With
        ServiceUnavailableError (or OSError, such as ConnectionError and TimeoutError) the episode begins again when the
        service is back.
        """
        ...

    async def close(self) -> None: ...


class MakeEnvironment(Protocol):
    """``--environment-path module:attr``: the class of an environment, or a function that makes one.

    >>> class Once:
    ...     def __init__(self, expected):
    ...         self.expected = expected
    ...
    ...     def tools(self):
    ...         return ()
    ...
    ...     async def step(self, turn):
    ...         return Observation(done=True, reward=float(turn.text == self.expected))
    ...
    ...     async def close(self): ...
    >>> def make_environment(prompt):
    ...     return Once(prompt.metadata.get("expected", prompt.label))
    >>> make_environment(prompt).expected
    '21'
    """

    def __call__(self, prompt: Prompt) -> Environment: ...


@runtime_checkable
class Agent(Protocol):
    """``--agent-path module:attr``: solves a prompt by turns of the model at ``base_url``, with the key in
    OPENAI_API_KEY.

    Returns what the sample's metadata keep as ``agent_turns`` (a number, say), or that and a reward: (turns, reward).
    The reward is a number or RewardParts; without one, the run's reward decides.

    >>> import aiohttp, os
    >>> async def ask_once(base_url, prompt):
    ...     body = {"model": "policy", "messages": [{"role": "user", "content": prompt.text}]}
    ...     headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    ...     async with aiohttp.ClientSession(headers=headers) as session:
    ...         async with session.post(f"{base_url}/chat/completions", json=body) as response:
    ...             answer = await response.json()
    ...     return 1, float(answer["choices"][0]["message"]["content"] == prompt.label)
    >>> asyncio.run(ask_once(base_url, prompt))
    (1, 1.0)
    """

    async def __call__(self, base_url: str, prompt: Prompt) -> object: ...


@runtime_checkable
class Reward(Protocol):
    """``--custom-rm-path module:attr``: the reward of one sample.

    Raises RewardError (or anything) on failure, and ServiceUnavailableError (or OSError, such as ConnectionError and
    TimeoutError) if a service that it needs is down: it is asked again when that is back.

    >>> async def digits_right(prompt, sample):
    ...     if sample.finish_reason != "stop":
    ...         return 0.0
    ...     right = sum(said == expected for said, expected in zip(sample.text, prompt.label))
    ...     return right / len(prompt.label)
    >>> asyncio.run(digits_right(prompt, sample))
    0.5
    """

    async def __call__(self, prompt: Prompt, sample: Sample) -> Rewarded:
        """Return a number, or one with its parts (RewardParts), or with rewards of single tokens for
        ``--advantage-estimator token_rewards``.
        """
        ...


@runtime_checkable
class GroupReward(Protocol):
    """``--group-rm-path module:attr``: the rewards of all samples of a prompt, which may depend on each other.

    The samples come with the rewards that they have by then: of the environment or agent, or of ``--rm-type`` and
    ``--custom-rm-path``; None without any. Raises as Reward does, for the whole group.

    >>> async def shortest_is_best(prompt, samples):
    ...     shortest = min(len(sample.text) for sample in samples)
    ...     return [shortest / len(sample.text) for sample in samples]
    >>> asyncio.run(shortest_is_best(prompt, [sample, sample]))
    [1.0, 1.0]
    """

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Rewarded]:
        """Return the final reward of each sample, in their order, as Reward does."""
        ...


@runtime_checkable
class GroupFilter(Protocol):
    """``--group-filter-path module:attr``: why a rewarded group must not be trained on, or None to keep it.

    >>> def has_spread(group):
    ...     rewards = {sample.reward for sample in group.samples}
    ...     return None if len(rewards) > 1 else "all rewards are equal"
    >>> has_spread(group)
    'all rewards are equal'
    """

    def __call__(self, group: Group) -> str | None: ...
