"""Guard between a run and its reward, the user's or the project's."""

from __future__ import annotations

import structlog

from miles_async.algorithms.advantages.rewards import check_reward, with_reward
from miles_async.api import Reward
from miles_async.errors import OverdueError, RewardError, ServiceOutageError, ServiceUnavailableError
from miles_async.runtime.services import Circuit
from miles_async.runtime.user_code import raised, run_user_code, wrong_value
from miles_async.types import Prompt, Rewarded, RewardParts, Sample, TokenRewards

log = structlog.get_logger(__name__)

CLOSE_SECONDS = 10.0


class GuardedReward:
    """A Reward that does not end the run for a bad sample or a short outage of a service."""

    def __init__(self, reward: Reward, timeout: float | None, circuit: Circuit | None = None) -> None:
        """``timeout``: seconds of one try; None for a reward that keeps the time itself. ``circuit``: of the service
        that it needs, which it is asked again through; None for a reward that does so itself.
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
        try:
            given = await self._asked(prompt, sample)
            if not isinstance(given, TokenRewards | RewardParts):
                return check_reward(_number(given))
            with_reward(sample, given)
            return given
        except (RewardError, OverdueError, ServiceOutageError):
            raise
        except ServiceUnavailableError as error:  # although its service answers others
            raise RewardError(str(error)) from error
        except Exception as error:  # supervision point: the user's own code runs here
            raise RewardError(f"reward {raised(error)}") from error

    async def _asked(self, prompt: Prompt, sample: Sample) -> Rewarded:
        async def ask() -> Rewarded:
            overdue = f"reward took longer than --reward-timeout {self._timeout or 0:g} s"
            return await run_user_code(self._reward(prompt, sample), seconds=self._timeout, overdue=overdue)

        return await (ask() if self._circuit is None else self._circuit.call(ask))

    async def close(self) -> None:
        """Close the reward, if it can be."""
        if close := getattr(self._reward, "close", None):
            try:
                await run_user_code(close(), seconds=CLOSE_SECONDS, overdue=f"took longer than {CLOSE_SECONDS:g} s")
            except Exception as error:  # supervision point: the run is over, nothing depends on it
                log.warning("reward could not be closed", error=repr(error))


def _number(given: float) -> float:
    """Convert to float, from numpy or torch as well. Raises UserCodeError if it is no number."""
    try:
        return float(given)
    except Exception as error:  # torch's is a RuntimeError, and the user's own object may raise anything
        raise wrong_value(given, "a number") from error
