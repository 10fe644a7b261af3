"""Keeps a bounded number of attempts under way; turns each into a group in the pool, or ends it.

Every decision is the pool's (``staleness.pool``): whether one more attempt may start, what becomes of the
prompt of one that ended untrained, which groups are fresh at the cut. This file runs them on an event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import structlog

from miles_async.algorithms.advantages.rewards import with_reward, with_rewards
from miles_async.api import EngineClient, Generate, GroupFilter, GroupReward, Reward
from miles_async.arguments.rollout import RolloutArguments
from miles_async.errors import (
    MilesAsyncError,
    OverdueError,
    RequestRejectedError,
    RewardError,
    ServiceUnavailableError,
    StalledError,
    TransientEngineError,
    UserCodeError,
    VersionUnknownError,
    first_error,
)
from miles_async.rollout.checkpoint import RolloutSnapshot
from miles_async.rollout.concurrency import Concurrency
from miles_async.rollout.generate import check_sample, routing_key
from miles_async.rollout.group_in_flight import AttemptFailed, GroupInFlight
from miles_async.runtime.clock import now
from miles_async.runtime.own_thread import OwnThread
from miles_async.runtime.services import Circuit, Services
from miles_async.runtime.texts import shortened
from miles_async.runtime.user_code import call_user_code, check_metadata, expect, raised, run_user_code, unchanged
from miles_async.seams import PromptSource, Resumption
from miles_async.staleness.pool import Pool, PoolSnapshot
from miles_async.staleness.versions import OldestVersions
from miles_async.types import Attempt, Changes, Group, Sample

log = structlog.get_logger(__name__)


Teach = Callable[[Sample], Awaitable[Sample]]
"""``rollout.teacher.Teacher``: the sample with a teacher's log-probs; raises as it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """The parts of a rollout that depend on flags."""

    generate: Generate
    reward: Reward | None  # None: what generate gives, or the group's alone
    group_reward: GroupReward | None = None
    group_filter: GroupFilter | None = None
    service: Circuit = field(default_factory=lambda: Circuit("generation"))  # that Generate needs besides engines
    teach: Teach | None = None  # asked for rewarded samples


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
        concurrency: Concurrency,
        visible_version: Callable[[], int],
        stall_timeout: float,
        services: Services,
        min_samples: int | None = None,
        oldest_versions: OldestVersions | None = None,
        dead_letters: Path | None = None,
    ) -> None:
        """``visible_version``: what engines serve now. ``stall_timeout``: seconds the cut waits for a group.
        ``services`` that the hooks need. ``min_samples``: that a group needs; None: all. ``oldest_versions``: bounds
        that generation notes; None: unknown until a sample is finished. ``dead_letters``: file to which quarantined
        prompts are appended as JSON lines.
        """
        self.pool = pool
        self._source = source
        self._client = client
        self._hooks = hooks
        self._arguments = arguments
        self.concurrency = concurrency
        self._visible_version = visible_version
        self._stall_timeout = stall_timeout
        self.services = services
        self._min_samples = arguments.n_samples_per_prompt if min_samples is None else min_samples
        self._oldest_versions = oldest_versions or OldestVersions()
        self._dead_letters = dead_letters
        self._in_flight: dict[int, GroupInFlight] = {}  # by attempt id
        self._changed = asyncio.Condition()
        self._per_engine = arguments.rollout_concurrency_per_engine
        self._paused = False  # by `miles-async set`: groups in flight are finished, none is admitted
        self._progressed = -math.inf  # when a group finished or a version was committed, on the loop's clock
        self._source_thread = OwnThread("prompts")
        self._taking = asyncio.Lock()  # the cursor has passed a prompt that the pool does not have yet

    # ------------------------------------------------------------------------------------------ producer
    async def run(self) -> None:
        """Fill the pool whenever it has room, forever. Cancelling it ends everything live as cancelled."""
        try:
            async with asyncio.TaskGroup() as scope:
                scope.create_task(self.concurrency.run())
                while True:
                    async with self._changed:
                        await self._changed.wait_for(self._may_issue)
                    await self._offer_prompt()
                    if self._may_issue():  # settings may have changed meanwhile
                        scope.create_task(self._run_attempt(self.pool.issue(self._visible_version())))
        finally:
            self.pool.cancel_all()

    def _may_issue(self) -> bool:
        return self.pool.room() > 0 and not self._paused

    async def _offer_prompt(self) -> None:
        """Offer a fresh prompt to the pool, unless one is owed another try or was offered before."""
        while self.pool.needs_prompt():
            async with self._taking:
                for epoch, prompt in await self._source_thread.run(self._source.take, 1):
                    self.pool.offer(epoch, prompt)

    async def _run_attempt(self, attempt: Attempt) -> None:
        try:
            group = await self._generate_group(attempt)
            reason = self._filter(group) if group is not None else None
        except* AttemptFailed as failures:
            failure = first_error(failures)
            assert isinstance(failure, AttemptFailed)
            log.warning("attempt failed", prompt_id=attempt.prompt.prompt_id, reason=failure.reason)
            self.pool.failed(attempt, failure.reason, infrastructure=failure.infrastructure)
            await self._write_dead_letters()
        else:
            if group is None:
                return  # it was too old: the pool has ended it already
            if reason is not None:
                self.pool.filtered(attempt, reason, group)
            else:
                self.pool.finished(group)
                self._progressed = now()
        await self._notify()

    async def _generate_group(self, attempt: Attempt) -> Group | None:
        """None if the attempt was aborted, as it is if it becomes too old meanwhile."""
        reward = None if self._hooks.group_reward is None else self._reward_group
        flight = GroupInFlight(attempt, self._arguments, self._min_samples, self._generate_sample, reward)
        self._in_flight[attempt.attempt_id] = flight
        try:
            return await flight.run()
        finally:
            del self._in_flight[attempt.attempt_id]
            flight.forget(self._oldest_versions)

    def _filter(self, group: Group) -> str | None:
        try:
            if self._hooks.group_filter is None:
                return None
            with unchanged(group.attempt.prompt, group.samples):
                reason = call_user_code(self._hooks.group_filter, group)
            return None if reason is None else shortened(expect(reason, str, "None or the reason, a text"))
        except Exception as error:  # supervision point: a user's filter costs its attempt, not the run
            raise AttemptFailed(f"group filter {raised(error)}", infrastructure=False) from error

    async def _generate_sample(self, attempt: Attempt, index: int, running: set[int]) -> Sample:
        """One rewarded sample; an infrastructure failure refills this sample only (C6).

        What was generated is kept while the service of its reward is down (``rewards.guard``): what crashes a reward
        must not be sampled away.
        """
        key = routing_key(attempt, index)
        failures: list[str] = []
        while len(failures) <= self._arguments.max_sample_failures:
            try:
                sample = await self._hooks.service.call(partial(self._generate, attempt, index, key, running))
                self._oldest_versions.note(key, check_sample(sample))
                if self._hooks.reward is not None:
                    sample = with_reward(sample, await self._hooks.reward(attempt.prompt, sample))
                return sample if self._hooks.teach is None else await self._hooks.teach(sample)
            except (TransientEngineError, VersionUnknownError) as error:
                self._oldest_versions.forget(key)
                failures.append(str(error))
                log.info("sample failed, retrying it", prompt_id=attempt.prompt.prompt_id, error=str(error))
            except OverdueError as error:  # possibly a service that hangs, so not charged to the prompt
                raise AttemptFailed(str(error), infrastructure=True) from error
            except (RequestRejectedError, RewardError, ServiceUnavailableError) as error:
                raise AttemptFailed(str(error), infrastructure=False) from error
            except Exception as error:  # supervision point: a user's Generate costs its attempt, not the run
                if isinstance(error, MilesAsyncError) and not isinstance(error, UserCodeError):
                    raise  # a fault of the machine, not of the user's code
                raise AttemptFailed(f"generate {raised(error)}", infrastructure=False) from error
        raise AttemptFailed(failures[-1], infrastructure=True)

    async def _generate(self, attempt: Attempt, index: int, key: str, running: set[int]) -> Sample:
        async with self.concurrency.slots:
            running.add(index)
            self._oldest_versions.watch(key)
            try:
                with unchanged(attempt.prompt, ()):
                    sample = await run_user_code(self._hooks.generate(self._client, attempt, index))
                check_metadata(expect(sample, Sample, "a Sample"), "returned")
                return sample
            except Exception:
                self._oldest_versions.forget(key)  # it may begin again, and nothing of this try is kept
                raise
            finally:
                running.discard(index)

    async def _reward_group(self, attempt: Attempt, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The finished samples with the rewards of their group."""
        assert self._hooks.group_reward is not None
        try:
            return with_rewards(samples, await self._hooks.group_reward(attempt.prompt, samples))
        except (OverdueError, TransientEngineError) as error:
            raise AttemptFailed(str(error), infrastructure=True) from error
        except RewardError as error:
            raise AttemptFailed(str(error), infrastructure=False) from error

    async def _write_dead_letters(self) -> None:
        if self._dead_letters is None:
            return
        letters, self.pool.dead_letters = self.pool.dead_letters, []
        if letters:
            lines = b"".join(msgspec.json.encode(letter) + b"\n" for letter in letters)
            try:
                await asyncio.to_thread(_append, self._dead_letters, lines)
            except OSError as error:  # the ledger has them, too, and says what a dead disk means for the run
                log.warning("quarantined prompts cannot be written", file=str(self._dead_letters), error=str(error))

    # ------------------------------------------------------------------------------------------ consumer
    async def cut(self, target_version: int) -> tuple[Group, ...]:
        """One batch, fresh for ``target_version`` (C1). Waits for groups to finish.

        Raises StalledError when none does for ``--stall-timeout`` although some could: a pool that is full and
        idle waits for the trainer, and an outage of a service ends; both have separate deadlines.
        """
        waits_since = now()
        async with self._changed:  # held from the look to the wait, so that no change falls in between
            self._abort_too_old(target_version)
            while (groups := self.pool.cut(target_version)) is None:
                self._changed.notify_all()  # the sweep left room
                if self._paused or not self.pool.can_move():
                    waits_since = now()
                waits_since = max(waits_since, self._progressed, self.services.paused_until())
                if now() >= (deadline := waits_since + self._stall_timeout):
                    raise StalledError(
                        f"the trainer waits for a batch, and no group finished for {self._stall_timeout:g} s "
                        f"(--stall-timeout): {self.pool.describe()}"
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
            self._changed.notify_all()
        return groups

    def _abort_too_old(self, target_version: int) -> None:
        """End attempts in flight that can no longer be trained: whole attempts, or the samples that their groups can do
        without.
        """
        for attempt_id in self.pool.in_doubt(target_version):
            if (flight := self._in_flight.get(attempt_id)) is None:  # its task has not begun
                continue
            versions = flight.versions(self._oldest_versions)
            aborted = self.pool.review(attempt_id, versions, target_version)
            if len(aborted) == len(versions):
                flight.abort()
            else:
                flight.abort_samples(aborted)

    async def change(self, changes: Changes) -> None:
        """Apply changed settings. Call between two cuts; generation may be paused at any time."""
        self.pool.change(changes)
        self._per_engine = changes.concurrency(self._per_engine)
        self.concurrency.change(self._per_engine)
        if (generation := changes.values.get("generation")) is not None:
            self._paused = generation == "paused"
            self._progressed = now()
        await self._notify()

    async def snapshot(self) -> RolloutSnapshot:
        """Snapshot prompt cursor and pool together: no prompt is in transit between them."""
        async with self._taking:
            return RolloutSnapshot(source=self._source.state(), pool=self.pool.snapshot())

    def restore(self, snapshot: PoolSnapshot, resumption: Resumption) -> None:
        """Restore the pool; before :meth:`run`."""
        groups_left = max(0, self._arguments.num_rollout - resumption.step) * self._arguments.rollout_batch_size
        self.pool.restore(
            snapshot,
            version=resumption.version,
            total_groups=groups_left,
            readmissions=resumption.readmissions,
            accepted=resumption.accepted,
        )

    async def commit(self, version: int) -> None:
        """Mark ``version`` visible and free the slots of trained groups."""
        self.pool.commit(version)
        self._progressed = now()
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
