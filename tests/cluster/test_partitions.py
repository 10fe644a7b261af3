"""Machines that are cut off for a while: the run waits for them, goes on without them, or ends with one error.

# covers: A1, A6, C2, C10
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from miles_async.runtime.processes.restarts import read_restarts
from tests.cluster.machines import Machine, Machines, machines, needs_machines
from tests.cluster.runs import (
    ENDING_SECONDS,
    ENGINES,
    RANKS,
    RUN_DIR,
    START_SECONDS,
    apart,
    assert_each_trained_once,
    assert_ends,
    assert_finished,
    assert_one_error,
    cluster_run,
    machine_with_ranks,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(840), needs_machines, pytest.mark.long]

ONE_RANK_EACH = ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1")  # on different machines


def cut_off(cluster: Machines, machine: Machine, seconds: float) -> None:
    cluster.cut(machine)
    time.sleep(seconds)
    cluster.reconnect(machine)


@pytest.mark.parametrize(
    ("driver", "lost"),
    [
        pytest.param(0, 0, id="driver and Ray's head"),
        pytest.param(1, 1, id="driver and engines"),
        pytest.param(0, 2, id="one of two ranks"),
    ],
)
def test_a_machine_out_of_reach_for_20_seconds_costs_that_time_and_no_step(
    tmp_path: Path, driver: int, lost: int
) -> None:
    with machines(tmp_path, 4) as cluster:
        cluster.start_ray({1: ENGINES, 2: RANKS, 3: RANKS})
        with cluster_run(cluster, *apart(8), *ONE_RANK_EACH, position=driver) as run:
            run.wait_for_steps(2, START_SECONDS)
            cut_off(cluster, cluster[lost], 20.0)
            assert_ends(run)
        assert_each_trained_once(run, 8)


def test_ranks_out_of_reach_for_good_end_the_run_and_leave_nothing_when_the_link_is_back(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray({0: ENGINES, 1: RANKS})
        with cluster_run(cluster, *apart(40)) as run:
            run.wait_for_steps(2, START_SECONDS)
            cut_off(cluster, cluster[1], 120.0)
            assert_ends(run, 1, seconds=ENDING_SECONDS)
        assert_one_error(run, "trainer rank ")


def test_ranks_out_of_reach_of_each_other_for_good_end_the_run(tmp_path: Path) -> None:
    with machines(tmp_path, 3) as cluster:
        cluster.start_ray({0: ENGINES, 1: RANKS, 2: RANKS})
        with cluster_run(cluster, *apart(40), *ONE_RANK_EACH) as run:
            run.wait_for_steps(2, START_SECONDS)
            cut_off(cluster, cluster[2], 120.0)
            assert_ends(run, 1, seconds=ENDING_SECONDS)
        assert_one_error(run, "trainer rank ")


def test_ranks_that_live_on_out_of_reach_do_not_disturb_the_run_that_was_restarted(tmp_path: Path) -> None:
    steps, checkpoints = 8, tmp_path / "checkpoints"
    checkpoints.mkdir()
    flags = ("--save", str(checkpoints), "--save-interval", "2", "--max-run-restarts", "1")
    with machines(tmp_path, 3, shared=[checkpoints]) as cluster:
        cluster.start_ray({0: ENGINES, 1: RANKS, 2: RANKS})
        with cluster_run(cluster, *apart(steps), *flags) as run:
            run.wait_for_steps(3, START_SECONDS)
            lost = machine_with_ranks(cluster, run)
            cluster.cut(lost)
            run.wait_for_output("restart 1, of 1 per hour", ENDING_SECONDS)
            assert any(lost.has(each.pid) for each in run.processes())  # until its Ray node gives up, too
            run.wait_for_steps(1, START_SECONDS)  # after the restart, which begins with an empty run directory
            cluster.reconnect(lost)
            assert_ends(run)
        assert len(read_restarts(run.run_dir)) == 1
        assert_finished(run)
        assert run.steps[-1]["step"] == steps


def test_engines_out_of_reach_for_20_seconds_are_not_restarted(tmp_path: Path) -> None:
    with machines(tmp_path, 3) as cluster:
        cluster.start_ray({0: RANKS, 1: ENGINES, 2: ENGINES})
        with cluster_run(cluster, *apart(8)) as run:
            run.wait_for_steps(2, START_SECONDS)
            cut_off(cluster, cluster[2], 20.0)
            assert_ends(run)
        assert_each_trained_once(run, 8)
        logs = [path.name for each in cluster.all for path in each.seen_from_host(f"{RUN_DIR}/logs").glob("engine-*")]
        assert sorted(logs) == ["engine-0.0.log", "engine-1.0.log"]


def test_engines_out_of_reach_for_120_seconds_hold_up_no_step_and_leave_nothing(tmp_path: Path) -> None:
    with machines(tmp_path, 3) as cluster:
        cluster.start_ray({0: RANKS, 1: ENGINES, 2: ENGINES})
        with cluster_run(cluster, *apart(12)) as run:
            run.wait_for_steps(2, START_SECONDS)
            cut_off(cluster, cluster[2], 120.0)
            assert_ends(run)
        assert_each_trained_once(run, 12)


@pytest.mark.parametrize("head", [0, 1], ids=["with Ray's head", "without Ray's head"])
def test_the_drivers_machine_out_of_reach_for_good_ends_the_run(tmp_path: Path, head: int) -> None:
    """``head``: how many machines are before the driver's; the first has Ray's head."""
    driver, engines, ranks = head, head + 1, head + 2
    with machines(tmp_path, ranks + 1) as cluster:
        cluster.start_ray({engines: ENGINES, ranks: RANKS})
        with cluster_run(cluster, *apart(40), position=driver) as run:
            run.wait_for_steps(2, START_SECONDS)
            cut_off(cluster, cluster[driver], 120.0)
            assert_ends(run, 1, seconds=ENDING_SECONDS)
        assert_one_error(run, "")  # it names the process that is noticed first
