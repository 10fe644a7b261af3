"""Black-box generation: an agent that only knows a model's API makes the trajectory, in a separate session.

Whose fault a failure is decides what becomes of the prompt (C6), and the session says so: engines that failed the
agent's last request, a session that is lost, a connection that could not be made are infrastructure; anything else that
an agent raises is its own. Running into the length limit is no failure, whatever the agent makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from miles_async.algorithms.advantages.rewards import with_reward
from miles_async.api import EngineClient
from miles_async.errors import OverdueError, RequestRejectedError, ServiceUnavailableError, TransientEngineError
from miles_async.rollout.generate import routing_key
from miles_async.rollout.prompt_messages import with_image_urls
from miles_async.runtime.services import causes, is_outage
from miles_async.runtime.user_code import raised, run_user_code
from miles_async.types import Attempt, CollectedSession, OpenSession, Prompt, RewardParts, Sample
from miles_async.types.shared_pictures import restored

log = structlog.get_logger(__name__)

RunAgent = Callable[[str, Prompt], Coroutine[object, None, object]]
"""(base URL, prompt) → what the agent returns: see ``api.Agent``."""


class Sessions(Protocol):
    """Source of sessions for agents: one conversation each, at its own URL."""

    async def open(self, routing_key: str) -> OpenSession:
        """Raises TransientEngineError if the session server is gone."""
        ...

    async def collect(self, session: OpenSession) -> CollectedSession:
        """End a session and take its trajectory. Raises TransientEngineError if it is lost."""
        ...

    async def abandon(self, session: OpenSession) -> None:
        """End a session whose trajectory is not wanted."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentGenerate:
    """A Generate whose samples come from an agent."""

    sessions: Sessions
    run_agent: RunAgent
    timeout: float  # seconds

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample:
        """Raises TransientEngineError for infrastructure, ServiceUnavailableError for services that the agent needs,
        RequestRejectedError for its own failures.

        The client is not used: the session server has its own way to the engines.
        """
        session = await self.sessions.open(routing_key(attempt, sample_index))
        try:
            returned, error = await self._run(session.base_url, with_image_urls(attempt.prompt))
        except BaseException:  # cancelled: the run ends, or the group did
            await self.sessions.abandon(session)
            raise
        collected = await self.sessions.collect(session)
        if collected.failure is not None:
            raise TransientEngineError(f"the agent's last request failed: {collected.failure}")
        if collected.ending in ("aborted", "expired"):
            raise TransientEngineError(f"the session of the agent ended as {collected.ending}")
        if error is not None and not collected.cut:
            raise _failure(error, waiting=collected.waiting)
        if (sample := collected.sample) is None:
            raise RequestRejectedError("the agent ended without a turn of the model")
        (sample,) = restored([sample], attempt.prompt.pictures)
        turns, reward = _turns_and_reward(returned)
        sample = msgspec.structs.replace(sample, metadata={**sample.metadata, "agent_turns": turns})
        return _rewarded(sample, collected.reward if reward is None else reward)

    async def _run(self, base_url: str, prompt: Prompt) -> tuple[object, Exception | None]:
        """(what it returned, what it raised)."""
        overdue = f"the agent took longer than --agent-timeout {self.timeout:g} s"
        try:
            return await run_user_code(self.run_agent(base_url, prompt), seconds=self.timeout, overdue=overdue), None
        except Exception as error:  # supervision point: a user's agent costs its attempt, not the run
            return None, error


def _failure(error: Exception, *, waiting: bool) -> Exception:
    if waiting and any(isinstance(cause, TimeoutError | OverdueError) for cause in causes(error)):
        return TransientEngineError(
            f"engines kept the agent waiting until its time (--agent-timeout), or its client's, was up: {error!r}"
        )
    if isinstance(error, OverdueError):
        return RequestRejectedError(str(error))
    if is_outage(error):
        return ServiceUnavailableError(f"the agent could not connect: {error!r}")
    return RequestRejectedError(f"the agent {raised(error)}")


def _turns_and_reward(returned: object) -> tuple[object, float | RewardParts | None]:
    """Raises RequestRejectedError for a reward that is neither a number nor RewardParts, which commands print as
    {"reward": 1.0, "parts": {...}}.
    """
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        return returned, None
    turns, reward = returned
    if reward is None or isinstance(reward, RewardParts):
        return turns, reward
    if isinstance(reward, int | float) and not isinstance(reward, bool):
        return turns, float(reward)
    try:
        return turns, msgspec.convert(reward, RewardParts)
    except msgspec.ValidationError as error:
        raise RequestRejectedError(
            "expected an agent to return turns or (turns, reward), where the reward is a number or RewardParts, found "
            f"{returned!r}: {error}"
        ) from None


def _rewarded(sample: Sample, given: float | RewardParts | None) -> Sample:
    """A number is checked where the reward of every sample is. Raises RequestRejectedError for unusable parts."""
    if not isinstance(given, RewardParts):
        return msgspec.structs.replace(sample, reward=given)
    try:
        return with_reward(sample, given)
    except Exception as error:  # supervision point: parts may be objects of the user's own
        raise RequestRejectedError(f"the agent's RewardParts: {error}") from error
