"""One attempt while it is generated: its running samples, and the samples left out of its group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import structlog

from miles_async.arguments.rollout import RolloutArguments
from miles_async.rollout.generate import routing_key
from miles_async.runtime.texts import shortened
from miles_async.staleness.versions import OldestVersions, group_of
from miles_async.types import Attempt, Group, Sample

log = structlog.get_logger(__name__)

MakeSample = Callable[[Attempt, int, set[int]], Awaitable[Sample]]
"""(attempt, index, indices of the samples that engines generate, to be kept) → one rewarded sample. Raises
AttemptFailed.
"""

RewardSamples = Callable[[Attempt, Sequence[Sample]], Awaitable[Sequence[Sample]]]
"""(attempt, its finished samples) → the same with the rewards of the group. Raises AttemptFailed."""


class AttemptFailed(Exception):
    """Ends an attempt; ``infrastructure`` tells whose fault it was (separate budgets, C6)."""

    def __init__(self, reason: str, *, infrastructure: bool) -> None:
        self.reason = shortened(reason)  # it goes into ledger, schedule and dead letters
        super().__init__(self.reason)
        self.infrastructure = infrastructure


class GroupInFlight:
    """The samples of one attempt, one task each."""

    def __init__(
        self,
        attempt: Attempt,
        arguments: RolloutArguments,
        fewest: int,
        make: MakeSample,
        reward: RewardSamples | None,
    ) -> None:
        """``fewest``: samples that the group needs (C7)."""
        self.attempt = attempt
        self.over = False  # aborted
        self._whole = arguments.n_samples_per_prompt
        self._begun = self._whole + arguments.extra_samples_per_prompt
        self._spare = self._begun - fewest
        self._make = make
        self._reward = reward
        self._tasks: list[asyncio.Task[None]] = []  # by index of the sample
        self._generating: set[int] = set()
        self._finished: dict[int, Sample] = {}
        self._left_out: set[int] = set()  # failed, or too old to be worth finishing
        self._aborted = 0  # of these, too old
        self._stopped = 0

    async def run(self) -> Group | None:
        """Run the attempt; return its samples, or those left while enough remain (C7); None if it was aborted.

        Of samples started beyond a group's size (``--extra-samples-per-prompt``) the slowest are stopped. Raises a
        group of AttemptFailed.
        """
        try:
            async with asyncio.TaskGroup() as scope:
                self._tasks = [scope.create_task(self._sample(index)) for index in range(self._begun)]
            if self._reward is not None and not self.over:
                async with asyncio.TaskGroup() as scope:
                    self._tasks.append(scope.create_task(self._rewarded(self._reward)))
        except* AttemptFailed:
            if not self.over:  # else it was aborted while its other samples came to their ends
                raise
        if self.over:
            return None
        samples = [self._finished[index] for index in sorted(self._finished)]
        return group_of(self.attempt, samples, stopped=self._stopped, aborted=self._aborted)

    def versions(self, oldest_versions: OldestVersions) -> Mapping[int, int | None]:
        """Map the index of each sample that the group can still have to an upper bound on its oldest version."""
        return {
            index: oldest_versions.oldest(routing_key(self.attempt, index))
            for index in range(self._begun)
            if index not in self._left_out
        }

    def abort(self) -> None:
        """Cancel all samples: the pool has ended the attempt."""
        self.over = True
        for task in self._tasks:
            task.cancel()  # a no-op for finished tasks

    def abort_samples(self, indices: Iterable[int]) -> None:
        """Cancel these samples unless they are finished; the group is made without them."""
        if len(self._finished) == self._whole:
            return  # the rest are being stopped
        for index in set(indices) - self._finished.keys() - self._left_out:
            self._left_out.add(index)
            self._aborted += 1
            self._tasks[index].cancel()

    def forget(self, oldest_versions: OldestVersions) -> None:
        for index in range(self._begun):
            oldest_versions.forget(routing_key(self.attempt, index))

    async def _rewarded(self, reward: RewardSamples) -> None:
        """Give the finished samples the rewards of their group."""
        indices = sorted(self._finished)
        samples = await reward(self.attempt, [self._finished[index] for index in indices])
        self._finished = dict(zip(indices, samples, strict=True))

    async def _sample(self, index: int) -> None:
        try:
            made = await self._make(self.attempt, index, self._generating)
        except AttemptFailed as failure:
            if self.over or index in self._left_out:  # aborted, and closing it failed
                return
            if len(self._left_out) == self._spare:
                raise
            self._left_out.add(index)
            log.warning("sample left out", prompt_id=self.attempt.prompt.prompt_id, reason=failure.reason)
            return
        if index in self._left_out or len(self._finished) == self._whole:
            return
        self._finished[index] = made
        if len(self._finished) == self._whole:
            self._stopped = len(self._generating - self._left_out)
            for task in self._tasks:
                task.cancel()
