"""``miles-async train`` on a machine of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.machines import Machines
from tests.integration.real_run import MARK, REVERSE, RealRun, real_run

RUN_DIR = "/tmp/run"  # on each machine its own
TRAIN, GENERATE = ("--actor-node-labels", "pool=train"), ("--rollout-node-labels", "pool=generate")


@contextmanager
def cluster_run(cluster: Machines, *flags: str, command: tuple[str, ...] = REVERSE) -> Iterator[RealRun]:
    """Run on the first machine; its run directory there is ``run.run_dir`` here. Nothing of it is alive afterwards."""
    driver = cluster[0]
    flags = ("--run-dir", RUN_DIR, "--ray-address", cluster.ray_address, "--forward-env", MARK, "PYTHONPATH", *flags)
    with real_run(driver.seen_from_host(RUN_DIR), *flags, command=driver.command(*command)) as run:
        yield run
