"""Machines that are slow, full or wrong about the time: the run waits for them, or ends with one error.

# covers: A1, A6, C2, C10
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.machines import machines, needs_machines, needs_tun
from tests.cluster.runs import (
    ENDING_SECONDS,
    ENGINES,
    RANKS,
    RUN_DIR,
    RUN_SECONDS,
    START_SECONDS,
    apart,
    assert_each_trained_once,
    assert_ends,
    assert_one_error,
    cluster_run,
)
from tests.integration.real_run import traceback_in

pytestmark = [pytest.mark.integration, pytest.mark.timeout(840), needs_machines, pytest.mark.long]


@needs_tun
def test_a_slow_link_that_loses_packets_is_only_slow(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as cluster:
        cluster.slow_down(cluster[1], delay=0.05, loss=0.01)
        cluster.start_ray({0: ENGINES, 1: RANKS})
        with cluster_run(cluster, *apart(4)) as run:
            assert_ends(run, seconds=START_SECONDS + RUN_SECONDS)
        assert_each_trained_once(run, 4)


def test_clocks_ten_minutes_off_make_no_difference(tmp_path: Path) -> None:
    with machines(tmp_path, 3, clocks_ahead={1: 600.0, 2: -600.0}) as cluster:
        asked = cluster[1].command("python", "-c", "import time; print(time.time())")
        assert float(subprocess.check_output(asked)) > time.time() + 500.0
        cluster.start_ray({1: RANKS, 2: ENGINES})
        with cluster_run(cluster, *apart(4)) as run:
            assert_ends(run, seconds=START_SECONDS + RUN_SECONDS)
        assert_each_trained_once(run, 4)


def test_a_full_disk_for_staged_weights_is_named(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray({0: ENGINES, 1: RANKS})
        for words in ("mkdir /tmp/small", "mount -t tmpfs -o nr_inodes=4 none /tmp/small"):
            subprocess.run(cluster[1].command(*words.split()), check=True)
        with cluster_run(cluster, *apart(4), "--weight-staging-dir", "/tmp/small") as run:
            assert_ends(run, 1, seconds=START_SECONDS)
        assert_one_error(run, "the weights of version 0 cannot be staged in /tmp/small/", "failed")
        last_line = run.output.splitlines()[-1]
        assert "No space left on device" in last_line
        assert "--weight-staging-dir" in last_line


def test_a_full_disk_for_checkpoints_is_named(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as cluster:
        driver = cluster[0]
        cluster.start_ray({0: RANKS, 1: ENGINES})
        # Large enough at the start, where a run is refused a disk on which no checkpoint has room.
        for words in ("mkdir /tmp/checkpoints", "mount -t tmpfs -o size=1g none /tmp/checkpoints"):
            subprocess.run(driver.command(*words.split()), check=True)
        flags = (*apart(200), "--save", "/tmp/checkpoints", "--save-interval", "4")
        with cluster_run(cluster, *flags) as run:
            run.wait_for_steps(1, START_SECONDS)
            subprocess.run(driver.command("mount", "-o", "remount,size=1m", "/tmp/checkpoints"), check=True)
            assert_ends(run, 1)
        assert_one_error(run, "--save /tmp/checkpoints: iter_0000004 was not saved: ", "failed")
        assert "No space left on device" in run.output.splitlines()[-1]


def test_a_disk_of_the_run_directory_that_becomes_full_ends_the_run(tmp_path: Path) -> None:
    with machines(tmp_path, 2) as cluster:
        driver = cluster[0]
        cluster.start_ray({0: ENGINES, 1: RANKS})
        # Large enough at the start, where a run is refused a disk that is nearly full.
        for words in (f"mkdir {RUN_DIR}", f"mount -t tmpfs -o size=100g none {RUN_DIR}"):
            subprocess.run(driver.command(*words.split()), check=True)
        with cluster_run(cluster, *apart(200)) as run:
            run.run_dir = Path(f"/proc/{driver.pid}/root{RUN_DIR}")  # mounted in the machine alone
            run.wait_for_steps(2, START_SECONDS)
            subprocess.run(driver.command("mount", "-o", "remount,size=32m", RUN_DIR), check=True)
            filling = driver.command("dd", "if=/dev/zero", f"of={RUN_DIR}/rest", "bs=1k")
            assert "No space left" in subprocess.run(filling, capture_output=True, text=True).stderr
            assert_ends(run, 1, seconds=ENDING_SECONDS)
        [error] = [line for line in run.output.splitlines() if line.startswith("error: ")]
        assert "disk is full" in error
        assert not traceback_in(run.output), run.output
