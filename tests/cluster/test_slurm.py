"""The batch script for SLURM: real Ray nodes and a real run on machines, and stand-ins for the commands of SLURM."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cluster.machines import Machines, machines, needs_machines
from tests.cluster.runs import NO_EVALUATION, RUN_DIR, assert_each_trained_once
from tests.integration.imported_server import MARK
from tests.integration.real_run import ROOT, real_run

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600), needs_machines]

RUN_SECONDS = 540.0
FLAGS = ("--run-dir", RUN_DIR, "--num-rollout", "4", *NO_EVALUATION, "--forward-env", MARK, "PYTHONPATH")

SRUN = """
for word in "$@"; do [[ $word == --nodelist=* ]] && nodes=${word#*=}; done
while [[ $1 == --* ]]; do shift; done
for node in ${nodes//,/ }; do "on-$node" "$@" & done
wait
"""


def write_commands(directory: Path, cluster: Machines) -> None:
    """Commands of SLURM, and those that the script finds on the first node: they run on machines."""
    scripts = {f"on-{machine.name}": f'exec {shlex.join(machine.command())} "$@"' for machine in cluster.all}
    scripts |= {
        "srun": SRUN,
        "scontrol": "\n".join(f"echo {machine.name}" for machine in cluster.all),
        "python": 'exec on-m1 python "$@"',
        "miles-async": 'exec on-m1 python -m miles_async "$@"',
    }
    directory.mkdir()
    for name, script in scripts.items():
        path = directory / name
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)


def test_the_batch_script_starts_ray_on_all_nodes_and_trains(tmp_path: Path) -> None:
    # covers: A6
    with machines(tmp_path, 2) as cluster:
        write_commands(tmp_path / "bin", cluster)
        slurm = (f"SLURM_SUBMIT_DIR={ROOT}", "SLURM_JOB_NODELIST=m[1-2]", f"MILES_ASYNC_BIN={tmp_path / 'bin'}")
        command = ("env", *slurm, "bash", "deploy/slurm/train.sbatch", "@examples/quickstart/reverse.args")
        with real_run(cluster[0].seen_from_host(RUN_DIR), *FLAGS, command=command) as run:
            assert run.wait(RUN_SECONDS) == 0, run.output
        assert_each_trained_once(run, 4)
        assert "engine-1.0.log" in {path.name for path in cluster[1].seen_from_host(f"{RUN_DIR}/logs").iterdir()}
