"""Guard between a run and its rewards, the user's or the project's."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TypeVar

import structlog

from miles_async.algorithms.advantages.rewards import check_reward, with_reward
from miles_async.api import GroupReward, Reward
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
_ENDS = (RewardError, OverdueError, ServiceOutageError)


class GuardedReward:
    """A Reward that does not end the run for a bad sample or a short outage of a service."""

    def __init__(self, reward: Reward, timeout: float | None, circuit: Circuit | None = None) -> None:
        """``timeout``: seconds of one try; None for a reward that keeps the time itself. ``circuit``: of its service,
        which retries it; None for a reward that does so itself.
        """
        self._reward = reward
        self._timeout = timeout
        self._circuit = circuit

    async def __call__(self, prompt: Prompt, sample: Sample) -> Rewarded:
        """Return a reward that can be trained on.

        Raises:
            RewardError: the sample has none.
            OverdueError: it or its service hangs; nothing says which.
            ServiceOutageError: which ends the run.
        """
        ask = partial(self._reward, prompt, sample)
        check = partial(_checked, sample)
        return await _guarded("reward", ask, [sample], check, self._timeout, self._circuit, _ENDS)

    async def close(self) -> None:
        await _close(self._reward, "reward")


class GuardedGroupReward:
    """A GroupReward that does not end the run for a bad group or a short outage of a service."""

    def __init__(self, reward: GroupReward, timeout: float, circuit: Circuit) -> None:
        """``timeout``: seconds of one try. ``circuit``: of the service that it needs."""
        self._reward = reward
        self._timeout = timeout
        self._circuit = circuit

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Rewarded]:
        """Return rewards that can be trained on.

        Raises:
            RewardError: the group has none.
            OverdueError: it or its service hangs; nothing says which.
            TransientEngineError: what it needs of the samples was lost.
            ServiceOutageError: which ends the run.
        """
        ask = partial(self._reward, prompt, tuple(samples))
        ends = (*_ENDS, TransientEngineError)
        check = partial(_all_checked, samples)
        return await _guarded("group reward", ask, samples, check, self._timeout, self._circuit, ends)

    async def close(self) -> None:
        await _close(self._reward, "group reward")


async def _guarded(
    name: str,
    ask: Callable[[], Coroutine[object, None, T]],
    samples: Sequence[Sample],
    check: Callable[[T], R],
    timeout: float | None,
    circuit: Circuit | None,
    ends: tuple[type[Exception], ...],
) -> R:
    """Get a reward of ``samples``; return ``check`` of it. ``name``: for errors; ``ends``: errors raised unchanged."""

    async def once() -> T:
        overdue = f"{name} took longer than --reward-timeout {timeout or 0:g} s"
        return await run_user_code(ask(), seconds=timeout, overdue=overdue)

    try:
        with unchanged(samples):
            given = await (once() if circuit is None else circuit.call(once))
        return check(given)
    except ends:
        raise
    except ServiceUnavailableError as error:  # although its service answers others
        raise RewardError(str(error)) from error
    except Exception as error:  # supervision point: the user's own code runs here
        raise RewardError(f"{name} {raised(error)}") from error


def _checked(sample: Sample, given: Rewarded) -> Rewarded:
    if not isinstance(given, TokenRewards | RewardParts):
        return check_reward(_number(given))
    with_reward(sample, given)
    return given


def _all_checked(samples: Sequence[Sample], given: Sequence[Rewarded]) -> Sequence[Rewarded]:
    to_list = getattr(given, "tolist", None)  # of numpy and torch
    rewards = to_list() if to_list else given
    if not isinstance(rewards, Sequence) or len(rewards) != len(samples):
        raise wrong_value(given, f"{len(samples)} rewards, one for each sample")
    return [_checked(sample, reward) for sample, reward in zip(samples, rewards, strict=True)]


async def _close(reward: object, name: str) -> None:
    if close := getattr(reward, "close", None):
        try:
            await run_user_code(close(), seconds=CLOSE_SECONDS, overdue=f"took longer than {CLOSE_SECONDS:g} s")
        except Exception as error:  # supervision point: the run is over, nothing depends on it
            log.warning(f"{name} could not be closed", error=repr(error))


def _number(given: float) -> float:
    """Convert to float, from numpy or torch as well. Raises UserCodeError if it is not a number."""
    try:
        return float(given)
    except Exception as error:  # torch's is a RuntimeError, and the user's own object may raise anything
        raise wrong_value(given, "a number") from error
