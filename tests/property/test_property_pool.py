"""A run in miniature: the pool, engines that finish in any order with any versions, a trainer that overlaps.

What the trainer gets is judged here by its own count of optimizer steps and by the tokens themselves, never by
the code under test.

# covers: C1, C2, C3, C4, C6, O2, O4, P1, P2, M5, M8
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.types import Attempt, Changes, Group
from tests.property.builders import make_group, make_prompt

SAMPLES = 3  # of a group that is whole


@dataclass
class Trainer:
    """Steps, and publishes after every ``interval``-th step, one batch prepared ahead; as the controller does."""

    interval: int
    steps: int = 0
    version: int = 0  # what the optimizer steps from next, or is stepping from
    since: int = 0  # steps that were trained since this version was published
    visible: int = 0  # what engines serve
    training: tuple[Group, ...] = ()
    prepared: tuple[Group, ...] = ()
    publishes: bool = False  # the step under way will be followed by a publication
    unpublished: bool = False  # stepped to a version that is not visible yet

    @property
    def version_of_next_batch(self) -> int:
        """Version that it will step from when the batch that is cut now is trained."""
        return self.version + (bool(self.training) and self.publishes)

    def may_run_on(self) -> range:
        """Versions that a serving engine can have: the visible one, and the next while it is being published."""
        return range(self.visible, self.visible + 1 + self.unpublished)


def oldest_loss_token(group: Group) -> int:
    return min(int(s.weight_versions[s.loss_mask == 1].min()) for s in group.samples)


class World:
    """Pool, trainer and what is in flight; every method is one thing that can happen."""

    def __init__(
        self,
        bound: int | None,
        lead: int,
        batch_size: int,
        interval: int,
        action: str,
        order: str,
        min_samples: int | None,
    ) -> None:
        self.bound, self.action = bound, action
        self.fewest = min_samples or SAMPLES
        policy = StalenessPolicy(
            bound=bound,
            lead_batches=lead,
            batch_size=batch_size,
            action=action,
            order=order,
            min_samples=min_samples,
        )
        retries = RetryPolicy(max_prompt_attempts=2, max_quarantined_prompts=10**6, recycle_stale=action == "recycle")
        self.policy, self.capacity = policy, policy.capacity
        self.cut_under = bound  # of the newest batch
        self.pool = Pool(policy, retries)
        self.pool.commit(0)
        self.trainer = Trainer(interval)
        self.in_flight: dict[int, Attempt] = {}
        self.begun: dict[int, dict[int, int | None]] = {}  # attempt → sample → version under which it was dispatched
        self.aborted = 0
        self.prompts = itertools.count()
        self.issued: list[Attempt] = []
        self.trained_ids: list[int] = []
        self.swept = 0

    def admit(self) -> None:
        if self.pool.needs_prompt():
            self.pool.offer(0, make_prompt(f"prompt {next(self.prompts)}"))
        attempt = self.pool.issue(self.trainer.visible)
        self.in_flight[attempt.attempt_id] = attempt
        self.begun[attempt.attempt_id] = dict.fromkeys(range(SAMPLES))
        self.issued.append(attempt)

    def dispatch(self, attempt_id: int, index: int, *, lost: bool) -> None:
        """The request of a sample goes out under the visible version, or is lost and has to begin again."""
        begun = self.begun[attempt_id]
        if index in begun and (begun[index] is None or lost):
            begun[index] = None if lost else self.trainer.visible

    def finish(self, attempt_id: int, versions: list[int], reward: float = 1.0) -> None:
        """A sample that was dispatched has its first token from that version, and no older one. ``reward``: of the
        first sample; the others have 1.
        """
        attempt, begun = self.in_flight.pop(attempt_id), self.begun.pop(attempt_id)
        oldest, newest = min(versions), max(versions)
        anything = [[newest], versions, [newest if len(versions) > 2 else oldest]]
        samples = [
            sorted(of_sample if first is None else [first, *(max(first, version) for version in of_sample)])
            for of_sample, first in zip(anything, begun.values(), strict=False)
        ]
        self.pool.finished(make_group(attempt, samples, [reward, *[1.0] * (len(samples) - 1)]))

    def review(self) -> None:
        """Act as the dispatcher does when a batch is asked for. C5: what is aborted could not have been trained."""
        target = self.trainer.version_of_next_batch
        for attempt_id in self.pool.in_doubt(target):
            begun = self.begun[attempt_id]
            lead = self.pool.lead()
            aborted = self.pool.review(attempt_id, begun, target)
            assert self.pool.lead() == lead - (len(aborted) == len(begun))  # C3: exactly its own room
            assert not aborted or (self.action != "wait" and self.bound is not None)
            if len(aborted) == len(begun):
                may_be_fresh = [v for v in begun.values() if v is None or target - v <= self.bound]
                assert len(may_be_fresh) < self.fewest
                del self.in_flight[attempt_id], self.begun[attempt_id]
                self.aborted += 1
            for index in aborted:
                if attempt_id in self.begun:
                    version = self.begun[attempt_id].pop(index)
                    assert version is not None
                    assert target - version > self.bound

    def change(self, bound: int | None, lead: int) -> None:
        """As `miles-async set` does, between two cuts. With ``wait`` the bound is not lowered: nothing may be swept."""
        if self.action == "wait" and bound is not None and (self.bound is None or bound < self.bound):
            return
        values = {"max_weight_staleness": bound, "max_rollout_lead": lead}
        self.pool.change(Changes(after=self.trainer.steps + 1, before={}, values=values))
        self.bound, self.policy = bound, replace(self.policy, bound=bound, lead_batches=lead)
        self.capacity = max(self.policy.capacity, self.pool.lead())  # what is under way continues

    def cut(self) -> None:
        self.review()
        self.cut_under = self.bound
        waiting = self.pool.balance().buffered
        groups = self.pool.cut(self.trainer.version_of_next_batch)
        self.swept += waiting - self.pool.balance().buffered - len(groups or ())
        self.trainer.prepared = groups or ()

    def start_training(self) -> None:
        trainer = self.trainer
        trainer.training, trainer.prepared = trainer.prepared, ()
        for group in trainer.training:  # C1, for every loss token, when the optimizer is about to step
            age = trainer.version - oldest_loss_token(group)
            assert age >= 0
            assert self.cut_under is None or age <= self.cut_under
            assert self.fewest <= len(group.samples) <= SAMPLES  # C7
        due = trainer.since + 1 >= trainer.interval
        waits = due and self.action == "wait" and self.pool.count_stale(trainer.version + 1) > 0
        trainer.publishes = due and not waits

    def finish_training(self) -> None:
        trainer = self.trainer
        self.pool.trained(trainer.training, trainer.version)
        self.trained_ids += [group.attempt.attempt_id for group in trainer.training]
        trainer.steps, trainer.since, trainer.training = trainer.steps + 1, trainer.since + 1, ()
        if trainer.publishes:
            trainer.version, trainer.since, trainer.unpublished = trainer.version + 1, 0, True
        elif self.action != "wait" or trainer.since < trainer.interval:
            self.pool.commit(trainer.visible)

    def publish(self) -> None:
        self.trainer.visible, self.trainer.unpublished = self.trainer.version, False
        self.pool.commit(self.trainer.visible)

    def step_trainer(self) -> None:
        """Whatever the trainer can do next."""
        if self.trainer.unpublished:
            self.publish()
        elif self.trainer.training:
            self.finish_training()
        elif self.trainer.prepared:
            self.start_training()


def worlds(**chosen: st.SearchStrategy) -> st.SearchStrategy[World]:
    """Any world, but for what is ``chosen``."""
    anything = {
        "bound": st.none() | st.integers(0, 3),
        "lead": st.integers(1, 4),
        "batch_size": st.integers(1, 3),
        "interval": st.integers(1, 3),
        "action": st.sampled_from(["recycle", "drop", "wait"]),
        "order": st.sampled_from(["oldest_first", "completion", "reward_variance"]),
        "min_samples": st.sampled_from([None, 1, 2]),
    }
    return st.builds(World, **(anything | chosen))


WORLDS = worlds()
LOSSY = worlds(
    bound=st.integers(0, 2),
    lead=st.integers(2, 4),
    interval=st.just(1),
    action=st.sampled_from(["recycle", "drop"]),
    min_samples=st.integers(1, 2),
)
"""Worlds in which groups lose samples (C7)."""


class PoolMachine(RuleBasedStateMachine):
    """Anything that can happen, in any order."""

    world: World

    @initialize(world=WORLDS)
    def start(self, world: World) -> None:
        self.world = world

    @precondition(lambda self: self.world.pool.room())
    @rule(count=st.integers(1, 9))
    def admit(self, count: int) -> None:
        for _ in range(min(count, self.world.pool.room())):
            self.world.admit()

    @precondition(lambda self: self.world.in_flight)
    @rule(data=st.data())
    def finish_group(self, data: st.DataObject) -> None:
        """Generated by any of the versions that were served since the attempt was admitted."""
        attempt_id = data.draw(st.sampled_from(sorted(self.world.in_flight)))
        newest = self.world.trainer.may_run_on()[-1]
        possible = st.integers(self.world.in_flight[attempt_id].issued_version, newest)
        reward = data.draw(st.sampled_from([1.0, 0.5, 0.0]))
        self.world.finish(attempt_id, data.draw(st.lists(possible, min_size=1, max_size=4)), reward)

    @precondition(lambda self: self.world.in_flight)
    @rule(data=st.data(), index=st.integers(0, SAMPLES - 1), lost=st.booleans())
    def dispatch_sample(self, data: st.DataObject, index: int, lost: bool) -> None:
        attempt_id = data.draw(st.sampled_from(sorted(self.world.in_flight)))
        self.world.dispatch(attempt_id, index, lost=lost)

    @precondition(lambda self: self.world.in_flight)
    @rule(data=st.data(), why=st.sampled_from(["filtered", "infrastructure", "data"]))
    def end_untrained(self, data: st.DataObject, why: str) -> None:
        attempt = self.world.in_flight.pop(data.draw(st.sampled_from(sorted(self.world.in_flight))))
        del self.world.begun[attempt.attempt_id]
        if why == "filtered":
            self.world.pool.filtered(attempt, "zero spread")
        else:
            self.world.pool.failed(attempt, "boom", infrastructure=why == "infrastructure")
        # C3, O2: whatever ends untrained is replaced at once, unless the capacity was lowered.
        assert self.world.pool.room() >= 1 or self.world.pool.lead() >= self.world.policy.capacity

    @precondition(lambda self: not self.world.trainer.prepared)
    @rule()
    def cut(self) -> None:
        self.world.cut()

    @rule()
    def step_trainer(self) -> None:
        self.world.step_trainer()

    @precondition(lambda self: not self.world.trainer.prepared)
    @rule(bound=st.none() | st.integers(0, 3), lead=st.integers(1, 4))
    def change(self, bound: int | None, lead: int) -> None:
        self.world.change(bound, lead)

    @invariant()
    def conservation(self) -> None:
        """C2: issued = in flight + buffered + cut + ended, by our count and the ledger's."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.pool.check()
        balance = world.pool.balance()
        summary = balance.summary()
        assert summary.pop("issued") == sum(summary.values()) == len(world.issued)
        assert balance.in_flight == len(world.in_flight)
        assert balance.cut == len(world.trainer.prepared) + len(world.trainer.training)
        assert len(set(world.trained_ids)) == len(world.trained_ids) == summary["trained"]

    @invariant()
    def bounded_lead_and_retries(self) -> None:
        """C4, P1: what is under way never exceeds the capacity. C6: nor do a prompt's attempts."""
        if not hasattr(self, "world"):
            return
        self.world.capacity = max(self.world.policy.capacity, min(self.world.capacity, self.world.pool.lead()))
        assert self.world.pool.lead() <= self.world.capacity
        for attempt in self.world.issued[-3:]:
            assert max(attempt.data_failures, attempt.infra_failures, attempt.stale_count) < 2

    def teardown(self) -> None:
        """C3: from wherever this stopped, the loop goes on; nothing has drained, nothing waits forever."""
        if not hasattr(self, "world"):
            return
        world, steps = self.world, self.world.trainer.steps
        for _ in range(20 * world.capacity):
            while world.pool.room():
                world.admit()
            for attempt_id in list(world.in_flight):
                world.finish(attempt_id, [world.trainer.visible])
            if not world.trainer.prepared:
                world.cut()
            world.step_trainer()
        assert world.trainer.steps >= steps + 3
        assert world.action != "wait" or world.swept == 0
        world.pool.cancel_all()
        summary = world.pool.balance().summary()
        assert summary["in_flight"] == summary["buffered"] == summary["cut"] == 0


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestPoolMachine = PoolMachine.TestCase


@settings(max_examples=60)
@given(WORLDS | LOSSY, st.integers(0, 2**32 - 1))
def test_long_runs_with_stragglers(world: World, seed: int) -> None:
    """C1 over hundreds of steps, deeper than the machine above gets: ``start_training`` judges every token."""
    chance = random.Random(seed)
    patience = chance.choice([1, 3, 10])  # how much longer the trainer takes than a group
    for _ in range(300):
        while world.pool.room():
            world.admit()
        for attempt_id, attempt in list(world.in_flight.items()):
            is_slow = attempt_id % 5 == 0
            if chance.random() < 0.5:
                world.dispatch(attempt_id, chance.randrange(SAMPLES), lost=chance.random() < 0.1)
            if chance.random() < (0.02 if is_slow else 0.5):
                possible = range(attempt.issued_version, world.trainer.may_run_on()[-1] + 1)
                versions = [chance.choice(possible) for _ in range(chance.randint(1, 3))]
                world.finish(attempt_id, versions, chance.choice([1.0, 0.5, 0.0]))
        if not world.trainer.prepared:
            world.cut()
        if chance.random() < 1 / patience:
            world.step_trainer()
    world.pool.check()
    assert world.aborted == world.pool.balance().aborted
    if world.action == "wait":  # C5: never discards, and still publishes
        assert world.swept == 0
        assert world.trainer.visible > 0 or world.trainer.steps < world.capacity + world.trainer.interval


@settings(max_examples=60)
@given(WORLDS | LOSSY, st.integers(0, 2**32 - 1))
def test_each_batch_obeys_the_bound_that_it_was_cut_under(world: World, seed: int) -> None:
    """C1 while bound and lead change between cuts, up and down: ``start_training`` judges every token. C3: the loop
    goes on under each of them.
    """
    chance = random.Random(seed)
    for _ in range(400):
        if not world.trainer.prepared and chance.random() < 0.05:
            world.change(chance.choice([None, 0, 1, 2, 3]), chance.randint(1, 4))
        while world.pool.room():
            world.admit()
        for attempt_id, attempt in list(world.in_flight.items()):
            if chance.random() < 0.4:
                world.dispatch(attempt_id, chance.randrange(SAMPLES), lost=chance.random() < 0.1)
            if chance.random() < 0.4:
                possible = range(attempt.issued_version, world.trainer.may_run_on()[-1] + 1)
                world.finish(attempt_id, [chance.choice(possible) for _ in range(chance.randint(1, 3))])
        if not world.trainer.prepared:
            world.cut()
        world.step_trainer()
        assert world.pool.capacity == world.policy.capacity
    world.pool.check()
    assert world.trainer.steps > 10


@settings(max_examples=60)
@given(WORLDS, st.integers(0, 2**32 - 1))
def test_nothing_is_swept_when_groups_finish_in_order(world: World, seed: int) -> None:
    """C4: admission alone keeps every age within the bound, if service is first in, first out: also where an order by
    rewards finds nothing to tell groups by.

    Groups are as old as they can be: all tokens from the version that was visible at admission. Slots are taken
    the moment they are free, which is the worst case; some attempts fail and are replaced.
    """
    chance = random.Random(seed)
    patience = chance.choice([1, 3, 10])
    for _ in range(400):
        while world.pool.room():
            world.admit()
        oldest = min(world.in_flight, default=None)
        if oldest is not None and chance.random() < 0.1:
            del world.begun[oldest]
            world.pool.failed(world.in_flight.pop(oldest), "boom", infrastructure=chance.random() < 0.5)
        elif oldest is not None:
            world.finish(oldest, [world.in_flight[oldest].issued_version])
        if not world.trainer.prepared:
            world.cut()
        if chance.random() < 1 / patience:
            world.step_trainer()
    assert world.swept == world.aborted == 0
    assert world.trainer.steps >= 4
