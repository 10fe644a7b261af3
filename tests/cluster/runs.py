"""``miles-async train`` on a machine of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tests.cluster.machines import Machine, Machines
from tests.integration.imported_server import MARK
from tests.integration.real_run import REVERSE, RealRun, real_run, traceback_in
from tests.integration.trained_prompts import trained

RUN_DIR = "/tmp/run"  # on each machine its own
ENGINES, RANKS = "pool=generate", "pool=train"  # labels of Ray nodes
START_SECONDS = 400.0  # deadline of a run's first steps
RUN_SECONDS = 300.0  # and of the rest
ENDING_SECONDS = 120.0  # until a run notices that a machine is lost, and has ended; until orphans have
BATCH_SIZE, MAX_AGE = 16, 2  # of the quick start
NO_EVALUATION = ("--eval-prompt-data", "none", "--eval-interval", "none")
AddressIn = Literal["flag", "environment"]
TRAIN, GENERATE = ("--actor-node-labels", RANKS), ("--rollout-node-labels", ENGINES)


@contextmanager
def cluster_run(
    cluster: Machines,
    *flags: str,
    command: tuple[str, ...] = REVERSE,
    position: int = 0,
    address_in: AddressIn = "flag",
) -> Iterator[RealRun]:
    """Run on the machine at ``position``; its run directory there is ``run.run_dir`` here. Nothing of it is alive
    afterwards. ``address_in``: how the run learns the cluster's address.
    """
    driver = cluster[position]
    joining = ("--ray-address", cluster.ray_address) if address_in == "flag" else ()
    env = {"RAY_ADDRESS": cluster.ray_address} if address_in == "environment" else {}
    flags = ("--run-dir", RUN_DIR, *joining, "--forward-env", MARK, "PYTHONPATH", *flags)
    with real_run(driver.seen_from_host(RUN_DIR), *flags, command=driver.command(*command, env=env)) as run:
        yield run


def apart(steps: int) -> tuple[str, ...]:
    """Flags of a run of as many steps with ranks on some machines and engines on others, by their labels."""
    return ("--num-rollout", str(steps), *NO_EVALUATION, *TRAIN, *GENERATE)


def machine_with_ranks(cluster: Machines, run: RealRun) -> Machine:
    """The machine on which the run's ranks are now."""
    return next(machine for machine in cluster.all if machine.has(run.actors("TrainerActor")[0].pid))


def assert_ends(run: RealRun, status: int = 0, seconds: float = RUN_SECONDS) -> None:
    """The run ends with this status in time, and leaves nothing behind."""
    assert run.wait(seconds) == status, run.output
    run.assert_nothing_left()


def assert_finished(run: RealRun) -> None:
    """The run came to its end, its books are balanced, and no sample was too old."""
    assert run.summary["ending"] == "finished"
    assert run.summary["balanced"]
    assert run.summary["age_max"] <= MAX_AGE


def assert_each_trained_once(run: RealRun, steps: int) -> None:
    """The run finished, and no prompt was trained twice or left out."""
    assert_finished(run)
    assert [step["step"] for step in run.steps] == list(range(1, steps + 1))
    prompts = [row.prompt_id for row in trained(run.run_dir)]
    assert len(prompts) == len(set(prompts)) == steps * BATCH_SIZE


def assert_one_error(run: RealRun, expected: str, ending: str = "lost") -> None:
    """The run ended with one line that says why, its books are balanced, and no prompt was trained twice."""
    assert run.output.splitlines()[-1].startswith(f"error: {expected}"), run.output
    assert not traceback_in(run.output), run.output
    assert run.summary["ending"] == ending
    assert run.summary["balanced"]
    prompts = [row.prompt_id for row in trained(run.run_dir)]
    assert len(prompts) == len(set(prompts))
