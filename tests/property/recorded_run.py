"""A run with ``--record`` in miniature: a pool, random events, a trainer; its run directory is as a real one's."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from miles_async.arguments import (
    AlgorithmArguments,
    Arguments,
    ClusterArguments,
    ObservabilityArguments,
    OptimizerArguments,
    RewardArguments,
    RolloutArguments,
    StalenessArguments,
)
from miles_async.arguments.config_file import to_toml
from miles_async.errors import DataError
from miles_async.ledger.schedule import Frame, ScheduleWriter
from miles_async.runtime.files.run_directory import CONFIG_FILE, SCHEDULE_FILE
from miles_async.runtime.serialization import read_frames, write_frames
from miles_async.staleness.pool import PoolSnapshot
from miles_async.staleness.versions import group_of
from miles_async.types import Attempt, Changes, Group, TrainShard
from miles_async.wiring.decisions import make_batches, make_pool
from tests.property.builders import make_prompt, make_sample

BASE = Arguments(
    cluster=ClusterArguments(actor_num_gpus_per_node=2),
    rollout=RolloutArguments(num_rollout=10**6, rollout_batch_size=2, n_samples_per_prompt=3, max_prompt_attempts=2),
    staleness=StalenessArguments(max_weight_staleness=1),
    optimizer=OptimizerArguments(max_tokens_per_gpu=16),
    observability=ObservabilityArguments(record=True),
)


def random_arguments(chance: random.Random) -> Arguments:
    """BASE with any policy."""
    return replace(
        BASE,
        rollout=replace(BASE.rollout, max_quarantined_prompts=chance.choice([2, 10**6])),
        staleness=StalenessArguments(
            max_weight_staleness=chance.choice([None, 0, 1, 2]),
            stale_group_action=chance.choice(["recycle", "drop", "wait"]),
            min_group_fraction=chance.choice([1.0, 0.5]),
            batch_order=chance.choice(["oldest_first", "completion", "reward_variance"]),
        ),
        algorithm=AlgorithmArguments(use_rollout_routing_replay=chance.choice([False, True])),
        rewards=RewardArguments(group_filter=chance.choice([(), ("max_length:5",)])),
    )


class RecordedRun:
    """Every method is one thing that can happen."""

    def __init__(
        self, run_dir: Path, arguments: Arguments, chance: random.Random, resumed: RecordedRun | None = None
    ) -> None:
        run_dir.mkdir(parents=True)
        (run_dir / CONFIG_FILE).write_text(to_toml(arguments))
        self.run_dir, self.arguments, self.chance = run_dir, arguments, chance
        self.writer = ScheduleWriter(run_dir / SCHEDULE_FILE)
        self.pool = make_pool(
            arguments.rollout,
            arguments.staleness,
            group_filter=arguments.rewards.group_filter,
            record=self.writer.pool,
        )
        self.batches = make_batches(arguments, quadratic_work=0.1, record=self.writer.batch)
        self.prompts, self.version, self.over = 0, 0, False
        self.bound, self.change_share = arguments.staleness.bound, chance.choice([0.0, 0.05])
        self.flying: list[Attempt] = []
        self.reviewed: dict[int, int] = {}  # attempt → samples that it goes on without
        self.cut: list[tuple[tuple[Group, ...], int]] = []
        self.made: list[tuple[TrainShard, ...]] = []
        if resumed is not None:
            self.prompts, self.version = resumed.prompts, resumed.version
            self._restore(resumed.pool.snapshot())
        self.pool.commit(self.version)

    def _restore(self, snapshot: PoolSnapshot) -> None:
        quarantined = [retry.prompt.prompt_id for retry in snapshot.state.book.quarantined]
        readmissions = {"request": quarantined[:1]} if quarantined else None
        self.pool.restore(snapshot, version=self.version, total_groups=10**6, readmissions=readmissions)

    def issue(self) -> None:
        for _ in range(self.pool.room()):
            if self.pool.needs_prompt():
                self.pool.offer(0, make_prompt(f"p{self.prompts}"))
                self.prompts += 1
            self.flying.append(self.pool.issue(self.version))

    def end_one(self) -> None:
        if not self.flying:
            return
        chance = self.chance
        attempt = self.flying.pop(chance.randrange(len(self.flying)))
        possible = range(attempt.issued_version, self.version + 1)
        group = group_of(
            attempt,
            [
                make_sample(
                    sorted(chance.choices(possible, k=chance.randint(1, 6))),
                    reward=chance.random(),
                    first_token=chance.randrange(1000),
                )
                for _ in range(3 - self.reviewed.pop(attempt.attempt_id, 0))
            ],
        )
        match chance.randrange(6):
            case 0:
                try:
                    self.pool.failed(attempt, "boom", infrastructure=chance.random() < 0.5)
                except DataError:  # --max-quarantined-prompts
                    self.over = True
            case 1:
                self.pool.filtered(attempt, "zero spread", group if chance.random() < 0.5 else None)
            case _:
                self.pool.finished(group)

    def review(self) -> None:
        """Of each sample in flight the first version may be known."""
        for attempt_id in self.pool.in_doubt(self.version):
            attempt = next(attempt for attempt in self.flying if attempt.attempt_id == attempt_id)
            left = range(3 - self.reviewed.get(attempt_id, 0))
            versions = {index: self.chance.choice([None, attempt.issued_version, self.version]) for index in left}
            aborted = self.pool.review(attempt_id, versions, self.version)
            self.reviewed[attempt_id] = self.reviewed.get(attempt_id, 0) + len(aborted)
            if len(aborted) == len(versions):
                self.flying.remove(attempt)

    def step(self) -> None:
        if not self.cut:
            self.review()
            if groups := self.pool.cut(self.version):
                self.cut.append((groups, self.version))
                self.made.append(self.batches.shards(groups, self.version))
            return
        self.pool.trained(*self.cut.pop())
        waits = self.arguments.staleness.stale_group_action == "wait"
        following = self.version + (1 if waits else self.chance.randint(1, 2))
        if not (waits and self.pool.count_stale(following)):
            self.version = following
        self.pool.commit(self.version)

    def change(self) -> None:
        """Another bound and lead, between two cuts; with ``wait`` the bound is not lowered."""
        bound, now = self.chance.choice([None, 0, 1, 2, 3]), self.bound
        lower = bound is not None and (now is None or bound < now)
        if self.cut or (lower and self.arguments.staleness.stale_group_action == "wait"):
            return
        values = {"max_weight_staleness": bound, "max_rollout_lead": self.chance.randint(1, 4), "lr": 1e-6}
        before = {"max_weight_staleness": now, "max_rollout_lead": None, "lr": 2e-6}
        self.pool.change(Changes(after=1, before=before, values=values))
        self.bound, self.batches = bound, replace(self.batches, bound=bound)

    def live(self, events: int) -> None:
        for _ in range(events):
            if not self.over and self.chance.random() < self.change_share:
                self.change()
            elif not self.over:
                self.chance.choice([self.issue, self.end_one, self.end_one, self.end_one, self.step])()

    def end(self) -> None:
        self.pool.cancel_all()
        self.die()

    def die(self) -> None:
        self.writer._locked(self.writer._write)
        self.writer._close()

    def frames(self) -> list[Frame]:
        with (self.run_dir / SCHEDULE_FILE).open("rb") as file:
            return list(read_frames(file, Frame))

    def overwrite(self, frames: Iterable[Frame]) -> None:
        with (self.run_dir / SCHEDULE_FILE).open("wb") as file:
            write_frames(file, frames)
