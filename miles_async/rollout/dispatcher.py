"""Keeps a bounded number of attempts under way; turns each into a group in the pool, or ends it.

Every decision is the pool's (``staleness.pool``): whether one more attempt may start, what becomes of the
prompt of one that ended untrained, which groups are fresh at the cut. This file runs them on an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from arguments.rollout import RolloutArguments
from miles_async.errors import (
    RequestRejectedError,
    RewardError,
    StalledError,
    TransientEngineError,
    VersionUnknownError,
)
from miles_async.protocols import EngineClient, Generate, GroupFilter, PromptSource, Reward
from miles_async.staleness.pool import Pool
from miles_async.staleness.versions import group_of, oldest_version
from miles_async.types import Attempt, Group, Sample

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """The parts of a rollout that users exchange."""

    generate: Generate
    reward: Reward
    group_filter: GroupFilter | None = None


class AttemptFailed(Exception):
    """Ends an attempt; ``infrastructure`` tells whose fault it was (separate budgets, C6)."""

    def __init__(self, reason: str, *, infrastructure: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.infrastructure = infrastructure


class Dispatcher:
    """The producer (:meth:`run`) and the consumer's end (:meth:`cut`) of the pool."""

    def __init__(
        self,
        *,
        pool: Pool,
        source: PromptSource,
        client: EngineClient,
        hooks: Hooks,
        arguments: RolloutArguments,
        num_engines: int,
        visible_version: Callable[[], int],
        stall_timeout: float,
        dead_letters: Path | None = None,
    ) -> None:
        """``visible_version``: what engines serve now. ``stall_timeout``: seconds the cut waits for any change.
        ``dead_letters``: where quarantined prompts are appended as JSON lines.
        """
        self.pool = pool
        self._source = source
        self._client = client
        self._hooks = hooks
        self._arguments = arguments
        self._slots = asyncio.Semaphore(num_engines * arguments.rollout_concurrency_per_engine)
        self._visible_version = visible_version
        self._stall_timeout = stall_timeout
        self._dead_letters = dead_letters
        self._changed = asyncio.Condition()

    # ------------------------------------------------------------------------------------------ producer
    async def run(self) -> None:
        """Fill the pool whenever it has room, for ever. Cancelling it ends everything live as cancelled."""
        try:
            async with asyncio.TaskGroup() as scope:
                while True:
                    async with self._changed:
                        await self._changed.wait_for(lambda: self.pool.room() > 0)
                    scope.create_task(self._run_attempt(await self._next_attempt()))
        finally:
            self.pool.cancel_all()

    async def _next_attempt(self) -> Attempt:
        """A prompt that is owed another try, else a fresh one."""
        while self.pool.needs_prompt():
            for epoch, prompt in await asyncio.to_thread(self._source.take, 1):
                self.pool.offer(epoch, prompt)
        return self.pool.issue(self._visible_version())

    async def _run_attempt(self, attempt: Attempt) -> None:
        try:
            group = await self._generate_group(attempt)
        except* AttemptFailed as failures:
            failure = failures.exceptions[0]
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            assert isinstance(failure, AttemptFailed)
            log.warning("attempt failed", prompt_id=attempt.prompt.prompt_id, reason=failure.reason)
            self.pool.failed(attempt, failure.reason, infrastructure=failure.infrastructure)
            await self._write_dead_letters()
        else:
            reason = self._hooks.group_filter(group) if self._hooks.group_filter else None
            if reason is not None:
                self.pool.filtered(attempt, reason)
            else:
                self.pool.finished(group)
        await self._notify()

    async def _generate_group(self, attempt: Attempt) -> Group:
        async with asyncio.TaskGroup() as scope:
            tasks = [
                scope.create_task(self._generate_sample(attempt, index))
                for index in range(self._arguments.n_samples_per_prompt)
            ]
        return group_of(attempt, [task.result() for task in tasks])

    async def _generate_sample(self, attempt: Attempt, index: int) -> Sample:
        """One rewarded sample; an infrastructure failure refills this sample only (C6)."""
        for _ in range(self._arguments.max_sample_failures):
            try:
                async with self._slots:
                    sample = await self._hooks.generate(self._client, attempt, index)
                oldest_version(sample.weight_versions, sample.loss_mask)  # unusable versions: not a sample
                return msgspec.structs.replace(sample, reward=await self._reward(attempt, sample))
            except (TransientEngineError, VersionUnknownError) as error:
                log.info(
                    "sample failed, generating it again", prompt_id=attempt.prompt.prompt_id, error=str(error)
                )
                last = str(error)
            except (RequestRejectedError, RewardError) as error:
                raise AttemptFailed(str(error), infrastructure=False) from error
        raise AttemptFailed(last, infrastructure=True)

    async def _reward(self, attempt: Attempt, sample: Sample) -> float:
        try:
            async with asyncio.timeout(self._arguments.reward_timeout):
                return float(await self._hooks.reward(attempt.prompt, sample))
        except TimeoutError as error:
            raise RewardError(
                f"reward took longer than --reward-timeout {self._arguments.reward_timeout:g} s"
            ) from error
        except Exception as error:  # supervision point: a user's reward costs its attempt, not the run
            raise RewardError(f"reward raised {error!r}") from error

    async def _write_dead_letters(self) -> None:
        if self._dead_letters is None:
            return
        letters, self.pool.dead_letters = self.pool.dead_letters, []
        if letters:
            lines = b"".join(msgspec.json.encode(letter) + b"\n" for letter in letters)
            await asyncio.to_thread(_append, self._dead_letters, lines)

    # ------------------------------------------------------------------------------------------ consumer
    async def cut(self, target_version: int) -> tuple[Group, ...]:
        """One batch, fresh for ``target_version`` (C1). Waits for groups to finish; StalledError if none does."""
        try:
            async with self._changed:  # held from the look to the wait, so that no change falls in between
                while (groups := self.pool.cut(target_version)) is None:
                    self._changed.notify_all()  # what was swept left room
                    async with asyncio.timeout(self._stall_timeout):
                        await self._changed.wait()
                self._changed.notify_all()
        except TimeoutError as error:
            raise StalledError(
                f"the trainer waits for a batch, and no group finished for {self._stall_timeout:g} s "
                f"(--stall-timeout): {self.pool.describe()}"
            ) from error
        await self._write_dead_letters()
        return groups

    def restore(self, state: Mapping[str, Any], *, step: int) -> None:
        """The pool as it was after ``step`` trained steps; before :meth:`run`."""
        steps_left = max(0, self._arguments.num_rollout - step)
        self.pool.restore(state, total_groups=steps_left * self._arguments.rollout_batch_size)

    async def commit(self, version: int) -> None:
        """``version`` is visible: what was trained makes room."""
        self.pool.commit(version)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
