"""The quick start, shortened, on a cluster: machines with an address, memory and files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.machines import Machines, machines, needs_machines
from tests.cluster.runs import GENERATE, RUN_DIR, TRAIN, cluster_run
from tests.integration.real_run import RealRun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420), needs_machines]

RUN_SECONDS = 300.0
SHORT = ("--num-rollout", "4", "--eval-prompt-data", "none", "--eval-interval", "none")


def logs_on(cluster: Machines, position: int) -> set[str]:
    return {path.name for path in cluster[position].seen_from_host(f"{RUN_DIR}/logs").glob("*.log")}


def assert_trained(run: RealRun, steps: int) -> None:
    summary = run.summary
    assert summary["steps"] == steps
    groups = summary["groups"]
    assert groups["trained"] == steps * 16
    assert groups["issued"] == sum(count for name, count in groups.items() if name != "issued")
    assert summary["logprob_diff"]["max"] < 1e-4  # the same weights on both sides


def test_ranks_on_one_machine_and_engines_on_another(tmp_path: Path) -> None:
    # covers: A6
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray({0: "pool=train", 1: "pool=generate"})
        with cluster_run(cluster, *SHORT, *TRAIN, *GENERATE) as run:
            assert run.wait(RUN_SECONDS) == 0, run.output
            run.assert_nothing_left()
        assert_trained(run, 4)
        assert {"trainer-0.log", "trainer-1.log", "router.0.log"} <= logs_on(cluster, 0)
        assert logs_on(cluster, 1) == {"engine-0.0.log", "engine-1.0.log"}
