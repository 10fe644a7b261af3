"""Guard between a run and its rewards, the user's or the project's."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

import structlog

from miles_async.algorithms.advantages.rewards import check_reward, with_reward
from miles_async.errors import (
    OverdueError,
    RewardError,
    ServiceOutageError,
    ServiceUnavailableError,
    TransientEngineError,
)
from miles_async.runtime.services import Circuit
from miles_async.runtime.user_code import raised, run_user_code, unchanged, wrong_value
from miles_async.types import Prompt, Rewarded, RewardParts, Sample, TokenRewards

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

CLOSE_SECONDS = 10.0


class _Guarded:
    """Gets rewards from a hook without ending the run for a bad sample or a short outage of a service."""

    name: str  # for errors
    ends: tuple[type[Exception], ...] = (RewardError, OverdueError, ServiceOutageError)  # raised unchanged

    def __init__(self, reward: Any, timeout: float | None, circuit: Circuit | None = None) -> None:
        """``timeout``: seconds of one try; None for a reward that keeps the time itself. ``circuit``: of its service,
        which retries it; None for a reward that does so itself.
        """
        self._reward = reward
        self._timeout = timeout
        self._circuit = circuit

    async def _get(
        self,
        ask: Callable[[], Coroutine[object, None, T]],
        prompt: Prompt,
        samples: Sequence[Sample],
        check: Callable[[T], R],
    ) -> R:
        """Get a reward of ``samples``; return ``check`` of it."""

        async def once() -> T:
            overdue = f"{self.name} took longer than --reward-timeout {self._timeout or 0:g} s"
            return await run_user_code(ask(), seconds=self._timeout, overdue=overdue)

        try:
            with unchanged(prompt, samples):
                given = await (once() if self._circuit is None else self._circuit.call(once))
            return check(given)
        except self.ends:
            raise
        except ServiceUnavailableError as error:  # although its service answers others
            raise RewardError(str(error)) from error
        except Exception as error:  # supervision point: the user's own code runs here
            raise RewardError(f"{self.name} {raised(error)}") from error

    async def close(self) -> None:
        """Close the reward, if it can be."""
        if close := getattr(self._reward, "close", None):
            try:
                await run_user_code(close(), seconds=CLOSE_SECONDS, overdue=f"took longer than {CLOSE_SECONDS:g} s")
            except Exception as error:  # supervision point: the run is over, nothing depends on it
                log.warning(f"{self.name} could not be closed", error=repr(error))


class GuardedReward(_Guarded):
    """A guarded Reward."""

    name = "reward"

    async def __call__(self, prompt: Prompt, sample: Sample) -> Rewarded:
        """Return a reward that can be trained on.

        Raises:
            RewardError: the sample has none.
            OverdueError: it or its service hangs; nothing says which.
            ServiceOutageError: which ends the run.
        """
        return await self._get(partial(self._reward, prompt, sample), prompt, [sample], partial(_checked, sample))


class GuardedGroupReward(_Guarded):
    """A guarded GroupReward."""

    name = "group reward"
    ends = (*_Guarded.ends, TransientEngineError)

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Rewarded]:
        """Return rewards that can be trained on.

        Raises:
            RewardError: the group has none.
            OverdueError: it or its service hangs; nothing says which.
            TransientEngineError: what it needs of the samples was lost.
            ServiceOutageError: which ends the run.
        """
        ask = partial(self._reward, prompt, tuple(samples))
        return await self._get(ask, prompt, samples, partial(_all_checked, samples))


def _checked(sample: Sample, given: Rewarded) -> Rewarded:
    if not isinstance(given, TokenRewards | RewardParts):
        return check_reward(_number(given))
    if isinstance(given, RewardParts) and not isinstance(given.parts, Mapping):
        raise wrong_value(given, "RewardParts with a mapping of parts")
    if isinstance(given, TokenRewards) and not isinstance(given.tokens, Sized):
        raise wrong_value(given, "TokenRewards with an array for each branch")
    with_reward(sample, given)
    return given


def _all_checked(samples: Sequence[Sample], given: Sequence[Rewarded]) -> Sequence[Rewarded]:
    to_list = getattr(given, "tolist", None)  # of numpy and torch
    rewards = to_list() if to_list else given
    if not isinstance(rewards, Sequence) or len(rewards) != len(samples):
        raise wrong_value(given, f"{len(samples)} rewards, one for each sample")
    return [_checked(sample, reward) for sample, reward in zip(samples, rewards, strict=True)]


def _number(given: float) -> float:
    """Convert to float, from numpy or torch as well. Raises UserCodeError if it is not a number."""
    try:
        return float(given)
    except Exception as error:  # torch's is a RuntimeError, and the user's own object may raise anything
        raise wrong_value(given, "a number") from error
