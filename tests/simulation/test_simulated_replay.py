"""A simulated run is recorded as a real one is, and its replay decides the same.

# covers: C11, C9
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import CheckpointArguments, StalenessArguments
from miles_async.errors import ProcessLostError, ReplayDifference
from miles_async.simulation.distributions import LogNormal
from miles_async.simulation.run import batch_maker, simulate
from miles_async.simulation.settings import Faults, SimulationSettings
from miles_async.wiring.decisions import make_pool
from miles_async.wiring.replay import Replay
from tests.simulation.scenario import settings
from tests.simulation.test_simulated_resume import live


def replay_of(chosen: SimulationSettings) -> Replay:
    return Replay(
        chosen.schedule, lambda record: make_pool(chosen.rollout, chosen.staleness, record=record), batch_maker(chosen)
    )


def faulty(path: Path) -> SimulationSettings:
    """Engines crash all the time, responses are of all lengths; some groups get too old, some lose samples."""
    staleness = StalenessArguments(max_weight_staleness=1, min_group_fraction=0.5)
    faults = Faults(mean_seconds_between_crashes=20.0)
    chosen = settings(steps=40, staleness=staleness, response_seconds=LogNormal(1.0, 1.2), faults=faults)
    return replace(chosen, schedule=path, engines=replace(chosen.engines, engine_max_restarts=1000))


def test_a_run_with_faults_is_replayed_step_by_step(tmp_path: Path) -> None:
    # covers: C1, C2, C5, C7
    chosen = faulty(tmp_path / "schedule")
    result = simulate(chosen)
    assert result.balance["recycled"] > 0
    replay = replay_of(chosen)
    batches = list(replay)
    assert [batch.step for batch in batches] == [step.step for step in result.steps]
    for batch, step in zip(batches, result.steps, strict=True):
        assert {batch.target_version - int(oldest) for oldest in batch.batch.oldest_versions} == set(step.ages)
        assert sum(step.ages.values()) == batch.batch.num_branches
    assert any(batch.batch.num_branches < chosen.rollout.samples_per_rollout for batch in batches)  # trimmed
    assert replay.complete
    with pytest.raises(ReplayDifference):
        list(replay_of(replace(chosen, staleness=replace(chosen.staleness, stale_group_action="drop"))))


def test_recording_changes_nothing(tmp_path: Path) -> None:
    chosen = faulty(tmp_path / "schedule")
    assert simulate(chosen).trace == simulate(replace(chosen, schedule=None)).trace


@pytest.mark.parametrize("action", ["recycle", "wait"])
def test_runs_that_were_killed_and_resumed_are_replayed_each(action: str, tmp_path: Path) -> None:
    staleness = StalenessArguments(max_weight_staleness=1, stale_group_action=action)
    saving = CheckpointArguments(save=tmp_path / "checkpoints", save_interval=1)
    chosen = replace(settings(steps=12, copy_seconds=0.5), staleness=staleness, checkpoint=saving)
    first = replace(chosen, schedule=tmp_path / "first")
    assert live(first, kill_at=400).killed
    last = replace(chosen, schedule=tmp_path / "last", checkpoint=replace(saving, load=saving.save), seed=1)
    life = live(last)
    assert life.restored > 0
    before, after = list(replay_of(first)), list(replay_of(last))
    steps = [batch.step for batch in after]
    assert steps == list(range(steps[0], 13))
    assert 1 < steps[0] <= len(before) + 1


def test_a_run_that_failed_is_replayed_to_its_end(tmp_path: Path) -> None:
    chosen = replace(settings(faults=Faults(trainer_fails_at_step=8)), schedule=tmp_path / "schedule")
    with pytest.raises(ProcessLostError):
        simulate(chosen)
    replay = replay_of(chosen)
    assert len(list(replay)) >= 7
    assert replay.complete
