"""Machines that die, every process at once, and some that come back: the run goes on without them, starts again, or
leaves nothing behind.

# covers: A1, A6, C2, C10
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from miles_async.runtime.processes.restarts import read_restarts
from tests.cluster.machines import machines, needs_machines
from tests.cluster.runs import (
    ENDING_SECONDS,
    ENGINES,
    RANKS,
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


def test_one_with_engines_costs_its_engines(tmp_path: Path) -> None:
    with machines(tmp_path, 3) as cluster:
        cluster.start_ray({0: RANKS, 1: ENGINES, 2: ENGINES})
        with cluster_run(cluster, *apart(10)) as run:
            run.wait_for_steps(2, START_SECONDS)
            cluster[2].kill()
            assert_ends(run)
        assert_each_trained_once(run, 10)


def test_the_only_one_with_engines_comes_back_and_the_run_goes_on(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray({0: RANKS, 1: ENGINES})
        with cluster_run(cluster, *apart(8), "--engine-max-restarts", "2") as run:
            run.wait_for_steps(2, START_SECONDS)
            cluster[1].kill()
            time.sleep(60.0)
            cluster.bring_back(cluster[1], ENGINES)
            assert_ends(run)
        assert_each_trained_once(run, 8)


def test_one_with_ranks_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """First without a restart. Then with one, which waits for a machine to come back, since none is left."""
    steps, checkpoints = 8, tmp_path / "checkpoints"
    checkpoints.mkdir()
    flags = (*apart(steps), "--save", str(checkpoints), "--save-interval", "2")
    with machines(tmp_path, 3, shared=[checkpoints]) as cluster:
        cluster.start_ray({0: ENGINES, 1: RANKS, 2: RANKS})
        with cluster_run(cluster, *flags) as run:
            run.wait_for_steps(3, START_SECONDS)
            first = machine_with_ranks(cluster, run)
            first.kill()
            assert_ends(run, 1, seconds=ENDING_SECONDS)
        assert_one_error(run, "trainer rank ")
        with cluster_run(cluster, *flags, "--load", str(checkpoints), "--max-run-restarts", "1") as run:
            run.wait_for_output(f"/{steps}  reward ", START_SECONDS)
            machine_with_ranks(cluster, run).kill()
            run.wait_for_output("restart 1, of 1 per hour", ENDING_SECONDS)
            cluster.bring_back(first, RANKS)
            assert_ends(run)
        assert len(read_restarts(run.run_dir)) == 1
        assert_finished(run)
        assert run.steps[-1]["step"] == steps


def test_the_same_command_goes_on_elsewhere_when_the_drivers_machine_died(tmp_path: Path) -> None:
    """As a scheduler gives it again: --save and --load name one directory, in which nothing is at first."""
    # covers: C9
    steps, checkpoints = 8, tmp_path / "checkpoints"
    checkpoints.mkdir()
    flags = (*apart(steps), "--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "2")
    with machines(tmp_path, 4, shared=[checkpoints]) as cluster:
        cluster.start_ray({2: ENGINES, 3: RANKS})
        with cluster_run(cluster, *flags, position=1) as run:
            run.wait_for_output("no checkpoint there yet, the run begins", START_SECONDS)
            run.wait_for_steps(5, START_SECONDS)
            cluster[1].kill()
        with cluster_run(cluster, *flags, position=0) as again:
            assert_ends(again)
        assert_finished(again)
        first = again.steps[0]["step"]
        assert first in (3, 5)  # the one after the last that was saved whole
        assert [step["step"] for step in again.steps] == list(range(first, steps + 1))


@pytest.mark.parametrize("head", [0, 1], ids=["with Ray's head", "without Ray's head"])
def test_the_drivers_machine_leaves_no_process_on_another(tmp_path: Path, head: int) -> None:
    """``head``: how many machines are before the driver's; the first has Ray's head."""
    driver, engines, ranks = head, head + 1, head + 2
    with machines(tmp_path, ranks + 1) as cluster:
        cluster.start_ray({engines: ENGINES, ranks: RANKS})
        with cluster_run(cluster, *apart(200), position=driver) as run:
            run.wait_for_steps(2, START_SECONDS)
            assert run.processes()
            cluster[driver].kill()
            deadline = time.monotonic() + ENDING_SECONDS
            while (left := run.processes()) and time.monotonic() < deadline:
                time.sleep(1.0)
            print(f"nothing left after {ENDING_SECONDS - (deadline - time.monotonic()):.0f} s")
            assert not left
