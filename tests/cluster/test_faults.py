"""Machines of a cluster that are cut off for a while, or die: the run waits for them, or goes on without them.

# covers: A1, A6, C2, C10
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, Machines, machines, needs_machines
from tests.cluster.runs import GENERATE, TRAIN, cluster_run
from tests.integration.real_run import RealRun
from tests.integration.trained_prompts import trained

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), needs_machines]

START_SECONDS = 240.0
RUN_SECONDS = 300.0
BATCH_SIZE = 16
NO_EVALUATION = ("--eval-prompt-data", "none", "--eval-interval", "none")
ENGINES, RANKS = "pool=generate", "pool=train"


def flags(steps: int) -> tuple[str, ...]:
    return ("--num-rollout", str(steps), *NO_EVALUATION, *TRAIN, *GENERATE)


def assert_each_trained_once(run: RealRun, steps: int) -> None:
    """The run came to its end, its books are balanced, and no prompt was trained twice or left out."""
    assert run.summary["ending"] == "finished"
    assert run.summary["balanced"]
    assert run.summary["age_max"] <= 2
    assert [step["step"] for step in run.steps] == list(range(steps))
    prompts = [row.prompt_id for row in trained(run.run_dir)]
    assert len(prompts) == len(set(prompts)) == steps * BATCH_SIZE


def cut_off(cluster: Machines, machine: Machine, seconds: float) -> None:
    cluster.cut(machine)
    time.sleep(seconds)
    cluster.reconnect(machine)


def test_ranks_out_of_reach_for_20_seconds_cost_that_time_and_no_step(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray({0: ENGINES, 1: RANKS})
        with cluster_run(cluster, *flags(8)) as run:
            run.wait_for_steps(2, START_SECONDS)
            cut_off(cluster, cluster[1], 20.0)
            assert run.wait(RUN_SECONDS) == 0, run.output
            run.assert_nothing_left()
        assert_each_trained_once(run, 8)


@pytest.mark.long
def test_a_dead_machine_with_engines_costs_its_engines(tmp_path: Path) -> None:
    with machines(tmp_path, 3) as cluster:
        cluster.start_ray({0: RANKS, 1: ENGINES, 2: ENGINES})
        with cluster_run(cluster, *flags(10)) as run:
            run.wait_for_steps(2, START_SECONDS)
            cluster[2].kill()
            assert run.wait(RUN_SECONDS) == 0, run.output
            run.assert_nothing_left()
        assert_each_trained_once(run, 10)
