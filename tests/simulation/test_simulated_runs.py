"""The contracts, on the real loop under virtual time with engines as slow and as uneven as can be."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from miles_async.arguments import Arguments, EnginesArguments, RolloutArguments, StalenessArguments, WeightsArguments
from miles_async.arguments.staleness_checks import check_staleness
from miles_async.ledger.reader import open_ledger
from miles_async.simulation.distributions import Fixed, LogNormal, Trace
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.settings import Faults
from miles_async.staleness.pool import Pool
from miles_async.staleness.versions import OldestVersions
from miles_async.types import Group
from tests.simulation.scenario import ROLLOUT, random_settings, settings

MODES = ("abort", "retract", "in_place")


class Scripted:
    """Seconds in the order given, then the last one forever."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)

    def draw(self, chance: random.Random) -> float:
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


def trace_lines(result: SimulationResult, *kinds: str) -> list[str]:
    lines = result.trace.decode().splitlines()
    return [line for line in lines if line.split()[1] in kinds]


# ------------------------------------------------------------------------------------------ staleness (C1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("latency", [LogNormal(1.0, 1.5), Trace((0.1, 0.1, 0.1, 20.0))])
def test_no_age_above_the_bound_is_trained_whatever_the_engines_do(mode: str, bound: int, latency: object) -> None:
    # covers: C1, M3
    result = simulate(
        settings(mode=mode, bound=bound, response_seconds=latency, faults=Faults(mean_seconds_between_crashes=200.0),
                 engines=EnginesArguments(engine_max_restarts=10_000))
    )  # fmt: skip
    assert max(result.ages) <= bound
    assert len(result.steps) == 30


def test_without_a_bound_older_ages_are_trained_and_nothing_is_thrown_away() -> None:
    # covers: C1
    result = simulate(settings(bound=None, steps=100))
    assert max(result.ages) > 1
    assert result.balance["recycled"] == result.balance["dropped"] == 0
    assert result.wasted_fraction == 0


def test_a_response_across_publications_is_as_old_as_its_first_token() -> None:
    # covers: C1, M5
    slow_first = Scripted(12.0, 1.0)  # the very first response takes as long as several steps of the others
    result = simulate(settings(bound=None, mode="in_place", response_seconds=slow_first, steps=20))
    finished = {line.split()[2]: int(line.rsplit("=", 1)[1]) for line in trace_lines(result, "finished")}
    assert finished["attempt=0"] == 0
    trained_at = [step.step for step in result.steps if max(step.ages) >= 4]
    assert trained_at, "the group that spans many versions is trained as the oldest of them"


# --------------------------------------------------------------------- conservation (C2), replenishing (C3, C5)
@pytest.mark.parametrize(("action", "outcome"), [("recycle", "recycled"), ("drop", "dropped")])
def test_slow_engines_make_groups_stale_and_each_is_replaced(action: str, outcome: str) -> None:
    # covers: C2, C3, C5
    staleness = StalenessArguments(max_weight_staleness=1, stale_group_action=action)
    result = simulate(settings(staleness=staleness, response_seconds=LogNormal(1.0, 1.0), steps=200))
    assert result.balance[outcome] > 0
    assert result.balance["trained"] == 400
    for step in result.steps:  # the recorder also checks the rows against the pool at every step
        groups = dict(step.groups)
        assert groups.pop("issued") == sum(groups.values())


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        pytest.param(mode, bound, marks=() if (mode, bound) in zip(MODES, (0, 1, 3), strict=True) else pytest.mark.long)
        for mode in MODES
        for bound in (0, 1, 3)
    ],
)
def test_wait_never_discards_and_never_trains_stale_groups(mode: str, bound: int) -> None:
    # covers: C1, C5
    staleness = StalenessArguments(max_weight_staleness=bound, stale_group_action="wait")
    options = {"response_seconds": LogNormal(1.0, 1.5), "steps": 200, "mode": mode}
    result = simulate(settings(**options, staleness=staleness))
    assert result.balance["recycled"] == result.balance["dropped"] == 0
    assert result.wasted_fraction == 0
    assert max(result.ages) == bound
    # The price: engines get weights less often. Not more than the lead of steps goes by without.
    published = [version.version for _, version in result.publications]
    assert published == list(range(len(published)))
    assert (len(published) < 200) == (bound > 0)
    steps = [step for step, line in enumerate(trace_lines(result, "step", "published")) if " published " in line]
    assert max(after - before for before, after in pairwise(steps)) <= 1 + (bound + 1)


@pytest.mark.parametrize("mode", MODES)
def test_samples_in_flight_that_are_too_old_are_aborted_at_the_engines(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C1, C2, C3, C5
    chosen = settings(mode=mode, steps=60, response_seconds=Trace((0.5, 0.5, 0.5, 0.5, 0.5, 9.0)))
    result = simulate(chosen)
    ends = [sum(step.untrained[name] for step in result.steps) for name in ("stale", "aborted", "recycled", "dropped")]
    stale, aborted, recycled, dropped = ends
    assert stale == recycled + dropped == result.balance["recycled"] + result.balance["dropped"]
    assert aborted > 5
    assert result.balance["issued"] == result.balance["trained"] + stale
    monkeypatch.setattr(OldestVersions, "oldest", lambda self, key: None)  # nothing is ever certain
    to_their_ends = simulate(chosen)
    assert sum(step.untrained["aborted"] for step in to_their_ends.steps) == 0
    assert result.wasted_fraction < 0.75 * to_their_ends.wasted_fraction


def test_groups_that_go_on_without_their_stale_samples_save_the_others() -> None:
    # covers: C1, C7
    options = {"response_seconds": LogNormal(1.0, 1.5), "steps": 200, "mode": "abort", "seed": 1}
    staleness = StalenessArguments(max_weight_staleness=1)
    whole, parts = (
        simulate(settings(**options, staleness=replace(staleness, min_group_fraction=fraction)))
        for fraction in (1.0, 0.5)
    )
    assert b" trimmed " in parts.trace
    assert max(parts.ages) <= 1
    assert sum(parts.ages.values()) < sum(whole.ages.values()) == 200 * 2 * 2
    assert parts.balance["recycled"] < 0.95 * whole.balance["recycled"]


def test_batches_in_order_of_completion_favour_short_responses() -> None:
    """Where the trainer is slow and several batches wait, so that there is a choice."""
    # covers: C4
    options = {"response_seconds": LogNormal(1.0, 1.5), "train_seconds": Fixed(10.0), "steps": 200, "trace": False}
    staleness = StalenessArguments(max_weight_staleness=4, max_rollout_lead=5)
    oldest_first, completion = (
        simulate(settings(**options, staleness=replace(staleness, batch_order=order)))
        for order in ("oldest_first", "completion")
    )
    assert mean_length(completion) < 0.9 * mean_length(oldest_first)
    assert completion.balance["recycled"] > oldest_first.balance["recycled"]
    assert max(completion.ages) <= 4


def test_batches_by_the_variance_of_rewards_leave_out_groups_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the trainer is slow and the lead leaves a choice: shorter ones are refused. What is left out comes to its
    end within the bound: every attempt is accounted for at every step, as in all simulated runs.
    """
    # covers: C1, C2, C3, C4
    disagreeing, pool_trained = Counter[tuple[str, int]](), Pool.trained

    def trained(pool: Pool, groups: tuple[Group, ...], target_version: int) -> None:
        disagreeing[order, bound] += sum(len({sample.reward for sample in group.samples}) > 1 for group in groups)
        pool_trained(pool, groups, target_version)

    monkeypatch.setattr(Pool, "trained", trained)
    dropped = {}
    for order, bound in itertools.product(("oldest_first", "reward_variance"), (2, 3)):
        staleness = StalenessArguments(max_weight_staleness=bound, stale_group_action="drop", batch_order=order)
        result = simulate(settings(staleness=staleness, train_seconds=Fixed(10.0), steps=100, trace=False))
        assert max(result.ages) <= bound
        assert result.balance["trained"] == 200
        dropped[order, bound] = result.balance["dropped"]
    assert disagreeing["reward_variance", 3] > 1.2 * disagreeing["oldest_first", 3]
    assert disagreeing["reward_variance", 2] == disagreeing["oldest_first", 2]  # a lead of 3: no choice
    assert [case for case, count in dropped.items() if count] == [("reward_variance", 3)]


def mean_length(result: SimulationResult) -> float:
    """Of trained responses, in tokens."""
    trained = result.trained_lengths
    return sum(length * count for length, count in trained.items()) / sum(trained.values())


# --------------------------------------------------------------------------------------- pacing (C4), P1, P3
def test_a_slow_trainer_keeps_the_lead_bounded() -> None:
    # covers: C4, P1
    for bound in (0, 1, 3):
        result = simulate(settings(bound=bound, train_seconds=Fixed(50.0)))
        assert result.max_lead == (bound + 1) * 2
        assert result.balance["recycled"] == 0  # everything is long finished when it is cut, so oldest first


def test_on_policy_alternates_strictly() -> None:
    # covers: C11, P3
    result = simulate(settings(staleness=StalenessArguments(on_policy=True), response_seconds=LogNormal(1.0, 1.0)))
    assert set(result.ages) == {0}
    kinds = [line.split()[1] for line in trace_lines(result, "issued", "cut", "train", "published")]
    turns = [kind for kind, after in pairwise([*kinds, ""]) if kind != after]  # repetitions as one
    assert turns == ["published", "issued", "cut", "train"] * 30


def test_one_straggler_never_blocks_finished_groups_behind_it() -> None:
    # covers: C4, A11
    result = simulate(settings(bound=None, response_seconds=Scripted(500.0, 1.0), steps=20))
    assert result.steps[-2].ended < 100
    assert result.steps[-1].ended > 500  # the straggler is trained in the last batch, with nobody left to overtake it
    assert "attempts=0," in trace_lines(result, "cut")[-1]


def test_the_trainer_waits_no_longer_than_a_batch_takes() -> None:
    # covers: C3
    result = simulate(settings(bound=2, response_seconds=LogNormal(1.0, 1.0), steps=300))
    assert max(step.wait_seconds for step in result.steps) < 60
    assert result.trainer_idle_fraction < 0.9


# ------------------------------------------------------------------------------------------- liveness (C3, C10)
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 500), marks=pytest.mark.long)], ids=str)
def test_every_configuration_is_refused_at_the_start_or_makes_progress(seeds: range) -> None:
    # covers: C3, C10
    outcomes = {"refused": 0, "done": 0}
    for seed in seeds:
        drawn = random_settings(seed)
        if list(check_staleness(Arguments(staleness=drawn.staleness, weights=drawn.weights))):
            outcomes["refused"] += 1
            continue
        result = simulate(drawn)
        assert len(result.steps) == drawn.rollout.num_rollout
        assert result.balance["trained"] == drawn.rollout.num_rollout * drawn.rollout.rollout_batch_size
        if drawn.staleness.stale_group_action == "wait":
            assert result.balance["recycled"] == result.balance["dropped"] == 0
        outcomes["done"] += 1
    assert min(outcomes.values()) > 10


# ---------------------------------------------------------------------------------------- the simulation itself
def test_same_seed_same_trace_another_seed_another_trace() -> None:
    crashing = {
        "faults": Faults(mean_seconds_between_crashes=30.0),
        "engines": EnginesArguments(engine_max_restarts=10_000),
        "mode": "abort",
    }
    first, again, other = (simulate(settings(**crashing, seed=seed)) for seed in (1, 1, 2))
    assert b"engine-died" in first.trace
    assert first.trace == again.trace
    assert first.trace != other.trace


def test_the_global_generator_is_left_alone() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    simulate(settings(steps=2))
    assert random.random() == expected


def test_measured_times_are_those_that_were_put_in() -> None:
    """Engines that never wait: every response takes 1 s, a batch is one wave, the trainer takes 3 s."""
    rollout = RolloutArguments(
        num_rollout=100, rollout_batch_size=4, n_samples_per_prompt=2, rollout_max_response_len=10**6,
        rollout_concurrency_per_engine=4,
    )  # fmt: skip
    balanced = EnginesArguments(sglang_router_policy="least_load")
    result = simulate(
        settings(rollout=rollout, engines=balanced, response_seconds=Fixed(1.0), train_seconds=Fixed(3.0),
                 copy_seconds=0.5, publish_seconds=Fixed(0.25), bound=2)
    )  # fmt: skip
    assert result.rollout_seconds == pytest.approx(1.0)
    assert result.pause_seconds == pytest.approx(0.25)
    assert result.step_seconds == result.bound_seconds == pytest.approx(3.5)  # deliveries cost the trainer nothing
    assert result.trainer_idle_fraction == pytest.approx(0.0)
    assert result.slot_idle_fraction == pytest.approx(1 - 1 / 3.5, abs=0.02)
    assert result.wasted_fraction == 0
    assert result.drawn_lengths == result.trained_lengths


def test_tokens_of_aborted_requests_are_kept_unless_flags_say_otherwise() -> None:
    kept, generated_again = (
        simulate(settings(weights=WeightsArguments(pause_generation_mode="abort", keep_aborted=keep), bound=None))
        for keep in (True, False)
    )
    assert kept.wasted_fraction == 0
    assert generated_again.wasted_fraction > 0.1


def test_the_lag_of_publications_shows_in_the_ages() -> None:
    lagging = WeightsArguments(debug_publication_lag=2)
    result = simulate(settings(weights=lagging, bound=None, train_seconds=Fixed(0.1)))
    assert min(age for step in result.steps[5:] for age in step.ages) >= 2


def test_tokens_are_cut_at_the_longest_response() -> None:
    result = simulate(settings(rollout=replace(ROLLOUT, rollout_max_response_len=8)))
    assert max(result.trained_lengths) == 8


def test_the_ledger_on_disk_says_the_same(tmp_path: Path) -> None:
    # covers: C2
    file = tmp_path / "ledger.sqlite"
    staleness = StalenessArguments(max_weight_staleness=1)
    result = simulate(settings(staleness=staleness, response_seconds=LogNormal(1.0, 1.0), ledger=file))
    with open_ledger(file) as reader:
        assert reader.balance().summary() == result.balance


# ------------------------------------------------------------------------------------ rolling publication (C8)
@pytest.mark.parametrize("mode", ["abort", "retract"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_rolling_publication_never_stops_the_fleet_and_keeps_the_bound(mode: str, at_once: int) -> None:
    # covers: C1, C8
    weights = WeightsArguments(publish_order="rolling", rolling_engines=at_once, pause_generation_mode=mode)
    result = simulate(settings(weights=weights, num_engines=4, batch=6, bound=1, publish_seconds=Fixed(0.3), steps=40))
    assert max(result.ages) <= 1
    assert result.balance["trained"] == 240
    _, *later = "\n".join(trace_lines(result, "engine-paused", "engine-continued", "answer", "published")).split(
        " published version=0 "
    )
    paused: set[str] = set()
    most_paused, answers = 0, 0  # answers of engines that go on while others are paused
    for line in "".join(later).splitlines()[1:]:
        _, kind, engine, *_ = line.split()
        if kind == "engine-paused":
            paused.add(engine)
        elif kind == "engine-continued":
            paused.remove(engine)
        most_paused = max(most_paused, len(paused))
        answers += kind == "answer" and bool(paused) and engine not in paused
    assert most_paused == at_once
    assert answers > 0
