"""Engines, publications and the trainer fail at every step: the run goes on, or ends with the reason (C8, C10)."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from miles_async.arguments import EnginesArguments, WeightsArguments
from miles_async.errors import EngineError, ProcessLostError, PublicationError, ServiceOutageError, StalledError
from miles_async.simulation.distributions import Fixed, LogNormal, Trace
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.settings import CallFault, Crash, Faults, Silence
from tests.simulation.scenario import settings

PUBLICATION = (
    "/pause_generation",
    "/flush_cache",
    "/update_weights_from_distributed",
    "/continue_generation",
    "/init_weights_update_group",
)


def died(trace: bytes) -> int:
    return sum(b" engine-died " in line and b"why=stopped" not in line for line in trace.splitlines())


def up(trace: bytes, engine: str) -> int:
    return sum(f" engine-up engine={engine} ".encode() in line for line in trace.splitlines())


def longest_gap(result: SimulationResult) -> float:
    """Seconds between two steps."""
    return max(later.ended - earlier.ended for earlier, later in pairwise(result.steps))


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_crash_while_generating_costs_its_samples_and_the_engine_comes_back(mode: str) -> None:
    # covers: C6, C8
    result = simulate(settings(mode=mode, faults=Faults(crashes=(Crash(at_seconds=10.3, engine=0),))))
    assert died(result.trace) == 1
    assert up(result.trace, "engine-0") == 2
    assert result.balance["failed"] == 0  # samples are generated again, attempts survive
    assert len(result.publications[-1][1].engines) == 2  # repaired: it takes part in publications


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("only_tokens", "seconds"), [(False, 16.0), (True, 25.0)])
def test_steps_go_on_soon_though_one_engine_of_two_is_silent(only_tokens: bool, seconds: float, seed: int) -> None:
    # covers: C2, C10
    silence = Silence(at_seconds=40.0 + 1.3 * seed, seconds=45.0, engine=0, only_tokens=only_tokens)
    result = simulate(settings(steps=60, seed=seed, faults=Faults(silences=(silence,))))
    assert longest_gap(result) < seconds
    assert up(result.trace, "engine-0") == 2
    assert up(result.trace, "engine-1") == 1
    assert result.balance["trained"] == 120  # each attempt once, whatever was sent twice
    assert result.balance["failed"] == 0


@pytest.mark.parametrize("only_tokens", [False, True])
def test_late_answers_of_an_engine_that_continues_count_once(only_tokens: bool) -> None:
    # covers: C2
    silence = Silence(at_seconds=20.0, seconds=5.0, engine=0, only_tokens=only_tokens)
    result = simulate(settings(steps=60, faults=Faults(silences=(silence,))))
    assert 5 < longest_gap(result) < 9
    assert died(result.trace) == 0
    assert result.balance["trained"] == 120


@pytest.mark.parametrize("path", PUBLICATION)
@pytest.mark.parametrize("action", ["crash", "refuse"])
def test_an_engine_that_fails_a_step_of_a_publication_is_fenced_and_repaired(path: str, action: str) -> None:
    # covers: C8
    first = 1 if path == "/init_weights_update_group" else 3
    # Refused again and again: twice all are served together, then it alone, and there it must be its own fault.
    refusals = {"/init_weights_update_group": 4}.get(path, 3)  # the last of them alone
    faults = tuple(CallFault(engine=0, path=path, call=first + i, action=action) for i in range(refusals))
    result = simulate(settings(faults=Faults(calls=faults if action == "refuse" else faults[:1])))
    fenced = [record.fenced for _, record in result.publications if record.fenced]
    assert fenced[0] == ("engine-0",)
    assert up(result.trace, "engine-0") >= 2
    assert len(result.publications[-1][1].engines) == 2
    assert len(result.steps) == 30


@pytest.mark.parametrize("action", ["crash", "refuse", "hang"])
def test_an_engine_that_fails_while_weights_are_sent_costs_the_others_at_most_a_deadline(action: str) -> None:
    # covers: C8, C10
    fault = CallFault(engine=0, path="/update_weights_from_distributed", call=3, action=action)
    result = simulate(settings(faults=Faults(calls=(fault,))))
    assert len(result.steps) == 30
    assert len(result.publications[-1][1].engines) == 2
    assert max(record.pause_seconds for _, record in result.publications) < 300


@pytest.mark.parametrize("verification", ["full", "canary"])
def test_an_engine_with_wrong_weights_is_caught(verification: str) -> None:
    # covers: C8
    corrupt = CallFault(engine=1, path="/update_weights_from_distributed", call=3, action="corrupt")
    weights = WeightsArguments(verify_weights=verification)
    result = simulate(settings(weights=weights, faults=Faults(calls=(corrupt,))))
    assert [record.fenced for _, record in result.publications if record.fenced] == [("engine-1",)]
    assert len(result.steps) == 30


def test_an_engine_that_hangs_in_a_publication_costs_one_deadline() -> None:
    # covers: C8, C10
    hang = CallFault(engine=0, path="/flush_cache", call=3, action="hang")
    result = simulate(settings(faults=Faults(calls=(hang,))))
    pauses = sorted(record.pause_seconds for _, record in result.publications)
    assert pauses[-1] == pytest.approx(WeightsArguments().step_timeout + 0.1)
    assert pauses[-2] < 1


def test_the_run_waits_while_no_engine_is_left_and_goes_on_when_one_is_back() -> None:
    # covers: C10
    crashes = (Crash(at_seconds=58.0, engine=0), Crash(at_seconds=59.0, engine=1))
    result = simulate(settings(start_seconds=50.0, faults=Faults(crashes=crashes)))
    assert len(result.steps) == 30


def test_engines_that_do_not_come_back_in_time_end_the_run_by_the_deadline() -> None:
    # covers: C10
    crashes = (Crash(at_seconds=5010.0, engine=0), Crash(at_seconds=5010.0, engine=1))
    with pytest.raises(PublicationError, match=r"waited 660 s for an engine to publish to; starting: .*engine-0"):
        simulate(settings(start_seconds=5000.0, faults=Faults(crashes=crashes)))


def test_engines_that_never_come_back_end_the_run_by_the_restart_budget() -> None:
    # covers: C10
    crashes = (Crash(at_seconds=8.0, engine=0), Crash(at_seconds=9.0, engine=1))
    with pytest.raises(EngineError, match=r"no engine is left.*--engine-max-restarts"):
        simulate(settings(faults=Faults(crashes=crashes, never_restart=True)))


def test_engines_that_answer_nothing_are_a_stall_with_the_state_of_the_pool() -> None:
    # covers: C10
    patient = EnginesArguments(request_timeout=1e6)
    with pytest.raises(StalledError, match=r"no group finished for 600 s \(--stall-timeout\): 4 attempts in flight"):
        simulate(settings(response_seconds=Fixed(1e5), engines=patient, stall_timeout=600.0))


def test_a_trainer_that_dies_ends_the_run() -> None:
    # covers: C10
    with pytest.raises(ProcessLostError, match="rank 0 died in step 3"):
        simulate(settings(faults=Faults(trainer_fails_at_step=3)))


def test_a_trainer_that_never_exports_ends_the_run_by_the_deadline() -> None:
    # covers: C10
    with pytest.raises(PublicationError, match=r"waited 300 s for the trainer's export of version 3 \(--publication"):
        simulate(settings(faults=Faults(publication_hangs_at_version=3)))


def test_slow_publications_hold_back_generation_and_nothing_is_lost() -> None:
    # covers: C2, C8
    result = simulate(settings(publish_seconds=Trace((0.1, 0.1, 40.0)), mode="abort"))
    assert result.pause_seconds > 5
    assert result.balance["trained"] == 60
    assert result.balance["failed"] == 0


@pytest.mark.parametrize("seconds", [20.0, 40.0, 300.0])
def test_an_outage_of_the_reward_service_costs_its_time_and_not_one_generation(seconds: float) -> None:
    # covers: C2, C3, C6
    chosen = settings(bound=None, faults=Faults(reward_outage=(10.3, 10.3 + seconds)))
    result = simulate(chosen)
    assert len(result.steps) == 30
    assert max(step.wait_seconds for step in result.steps) >= seconds - 10
    balance = dict(result.balance)
    assert balance.pop("issued") == sum(balance.values())
    assert (balance["trained"], balance["failed"], balance["quarantined"]) == (60, 0, 0)
    assert result.generated_tokens == simulate(settings(bound=None)).generated_tokens  # none was generated again


def test_a_group_that_waited_too_long_for_its_reward_is_recycled_as_any_stale_one() -> None:
    # covers: C1, C3, C6
    result = simulate(settings(bound=1, faults=Faults(reward_outage=(10.3, 50.3))))
    assert max(result.ages) <= 1
    assert (len(result.steps), result.balance["failed"], result.balance["quarantined"]) == (30, 0, 0)


def test_a_stall_counts_from_the_end_of_an_outage() -> None:
    # covers: C10
    slow = settings(
        bound=None, stall_timeout=100.0, reward_seconds=Fixed(60.0), faults=Faults(reward_outage=(70.3, 150.0))
    )
    assert len(simulate(slow).steps) == 30


def test_an_outage_without_end_ends_the_run_with_the_name_of_the_service() -> None:
    # covers: C10
    with pytest.raises(
        ServiceOutageError,
        match=r"expected the simulated reward service to be back within 600 s \(--service-outage-timeout",
    ):
        simulate(settings(stall_timeout=100.0, faults=Faults(reward_outage=(10.3, math.inf))))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 150), *(pytest.param(seed, 450, marks=pytest.mark.long) for seed in range(6))]
)
def test_minutes_of_random_faults_leave_the_books_balanced_and_the_trainer_stepping(seed: int, steps: int) -> None:
    # covers: C1, C2, C3, C6, C8, C10
    chance = random.Random(seed)
    paths = (*PUBLICATION, "/generate", "/model_info", "/server_info", "/health_generate")
    calls = tuple(
        CallFault(
            engine=chance.randrange(4),
            path=chance.choice(paths),
            call=chance.randrange(2, 400),
            action=chance.choice(["crash", "refuse", "hang"]),
        )
        for _ in range(60)
    )
    order, mode = chance.choice(["all", "rolling"]), chance.choice(["abort", "retract"])
    result = simulate(
        settings(
            steps=steps,
            num_engines=4,
            seed=seed,
            weights=WeightsArguments(pause_generation_mode=mode, publish_order=order),
            engines=EnginesArguments(engine_max_restarts=10_000, request_timeout=60.0),
            response_seconds=LogNormal(3.0, 1.0),
            token_seconds=0.3,
            train_seconds=Fixed(4.0),
            faults=Faults(calls=calls, mean_seconds_between_crashes=60.0),
        )
    )
    assert died(result.trace) > steps / 7.5
    assert len(result.steps) == steps
    assert result.seconds >= result.steps[-1].ended >= 4 * steps, "still stepping"
    assert max(result.ages) <= 1
    balance = dict(result.balance)
    assert balance.pop("issued") == sum(balance.values())
    assert balance["trained"] == 2 * steps
