"""The built-in rewards by their names (``--rm-type``), and the rewards of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, partial

from miles_async.api import GroupReward, Reward
from miles_async.arguments.rewards import RewardArguments, parse_rm_type
from miles_async.errors import ConfigurationError, RewardError, ServiceUnavailableError
from miles_async.rewards.code_tests import CONFINED, code_reward, sandbox_level
from miles_async.rewards.guard import GuardedGroupReward, GuardedReward
from miles_async.rewards.judge import JudgeReward
from miles_async.rewards.math_answer import math_reward
from miles_async.rewards.multiple_choice import multiple_choice
from miles_async.rewards.programs import Limits
from miles_async.rewards.reasoning_gym_task import reasoning_gym_reward
from miles_async.rewards.remote import RemoteReward
from miles_async.rewards.text_match import exact_match, f1, format_reward
from miles_async.rewards.workers import WorkerPool
from miles_async.runtime.hooks import load_object
from miles_async.runtime.packages import require
from miles_async.runtime.services import Services
from miles_async.types import Prompt, RewardParts, Sample

OneReward = Callable[[Prompt, Sample], Awaitable[float]]


class RewardHub:
    """``--rm-type``, or ``rm_type`` of the row's metadata: one reward by its name, or a weighted sum.

    Every reward keeps ``--reward-timeout`` itself, from when it has its turn, and is asked again while its service is
    down: the server, or the processes that verify.
    """

    def __init__(self, arguments: RewardArguments, services: Services) -> None:
        """Set up without starting anything. Raises ConfigurationError if ``--rm-type`` cannot run here."""
        self._parts = parse_rm_type(arguments.rm_type or "")
        named = {name for name, _ in self._parts}
        if "reasoning_gym" in named:
            require("reasoning-gym", "--rm-type reasoning_gym")
        limits = cache(
            lambda: Limits(
                seconds=arguments.rm_code_timeout,
                memory_bytes=arguments.rm_code_memory << 20,
                level=sandbox_level(arguments.reward_sandbox),
            )
        )
        if named & CONFINED:
            limits()
        workers = WorkerPool(arguments.rm_workers, arguments.reward_timeout)
        confined = WorkerPool(arguments.rm_workers, arguments.reward_timeout)
        remote = RemoteReward(arguments.rm_url, arguments.reward_timeout)
        judge = JudgeReward(
            arguments.judge_url,
            arguments.judge_model,
            arguments.judge_template,
            arguments.reward_timeout,
            arguments.judge_scale,
        )
        self._closed_at_end = (workers, confined, remote, judge)
        verifiers = "the processes that verify (--rm-workers)"
        rows: dict[str, tuple[OneReward, str | None]] = {  # name → reward, and the service that it needs
            "exact_match": (exact_match, None),
            "math": (partial(math_reward, workers), verifiers),
            "f1": (f1, None),
            "multiple_choice": (multiple_choice, None),
            "code": (partial(code_reward, workers, limits, arguments.reward_timeout), verifiers),
            "format": (partial(format_reward, workers, arguments.rm_format), verifiers),
            "reasoning_gym": (partial(reasoning_gym_reward, confined, lambda: limits().level), verifiers),
            "remote_rm": (remote, f"the server at --rm-url {arguments.rm_url}"),
            "judge": (judge, f"the server at --judge-url {arguments.judge_url}"),
        }
        self.rewards = {name: reward for name, (reward, _) in rows.items()}
        self._circuits = {name: services.circuit(service) for name, (_, service) in rows.items() if service}

    async def __call__(self, prompt: Prompt, sample: Sample) -> float | RewardParts:
        """Return the weighted sum, with its parts if there are several. Raises RewardError naming a part without a
        value, which is not a 0.
        """
        total, parts = 0.0, dict[str, float]()
        for name, weight in self._parts_for(prompt):
            try:
                parts[name] = await self._ask(name, prompt, sample)
            except (RewardError, ServiceUnavailableError) as error:
                raise RewardError(f"{name}: {error}") from error
            total += weight * parts[name]
        return RewardParts(reward=total, parts=parts) if len(parts) > 1 else total

    async def _ask(self, name: str, prompt: Prompt, sample: Sample) -> float:
        ask = partial(self.rewards[name], prompt, sample)
        return await (self._circuits[name].call(ask) if name in self._circuits else ask())

    async def close(self) -> None:
        for part in self._closed_at_end:
            await part.close()

    def _parts_for(self, prompt: Prompt) -> tuple[tuple[str, float], ...]:
        own = prompt.metadata.get("rm_type")
        if own is None:
            return self._parts
        try:
            return parse_rm_type(str(own))
        except ConfigurationError as error:
            raise RewardError(f"prompt {prompt.prompt_id}, rm_type in its metadata: {error}") from error


def resolve_reward(arguments: RewardArguments, services: Services) -> GuardedReward:
    """Make the reward of this run, guarded: ``--custom-rm-path`` or ``--rm-type``. Raises ConfigurationError."""
    if arguments.custom_rm_path is not None:
        reward = load_object(arguments.custom_rm_path, Reward, "--custom-rm-path")
        circuit = services.circuit(f"the service of --custom-rm-path {arguments.custom_rm_path}")
        return GuardedReward(reward, arguments.reward_timeout, circuit)
    if arguments.rm_type is None:
        raise ConfigurationError("no reward: give --rm-type or --custom-rm-path module:attr")
    return GuardedReward(RewardHub(arguments, services), timeout=None)


def resolve_group_reward(arguments: RewardArguments, services: Services) -> GuardedGroupReward | None:
    """Make the reward of groups, guarded: ``--group-rm-path``. Raises ConfigurationError."""
    if arguments.group_rm_path is None:
        return None
    reward = load_object(arguments.group_rm_path, GroupReward, "--group-rm-path")
    circuit = services.circuit(f"the service of --group-rm-path {arguments.group_rm_path}")
    return GuardedGroupReward(reward, arguments.reward_timeout, circuit)
