"""Five minutes in which something is killed again and again: engines, the router, the session server, reward workers;
and agents that die and hang. It takes seven minutes.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.real_run import RealRun, real_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

SECONDS = 300.0
START_SECONDS = 400.0
PAUSES = (5.0, 15.0)  # between kills
VICTIMS = {
    "engine": "miles_async.engines.sglang.launcher",
    "router": "smg",
    "session server": "miles_async.wiring.session_process",
    "reward worker": "miles_async.rewards.worker",
}
FLAGS = (
    *("--agent-path", "tests.e2e.unreliable_agent:solve", "--agent-timeout", "30", "--rm-type", "math"),
    *("--num-rollout", "100000", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-num-gpus", "2"),
    *("--eval-prompt-data", "none", "--eval-interval", "none", "--engine-max-restarts", "1000"),
    *("--max-quarantined-prompts", "100000", "--max-weight-staleness", "2"),
)


def test_killing_everything_for_five_minutes_leaves_the_books_balanced_and_the_trainer_stepping(tmp_path: Path) -> None:
    # covers: C1, C2, C3, C6, C8, C10
    chance = random.Random(11)
    killed = dict.fromkeys(VICTIMS, 0)
    with real_run(tmp_path / "run", *FLAGS, command=("examples/blackbox_agent/run.sh",)) as run:
        run.wait_for_steps(1, START_SECONDS)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(chance.uniform(*PAUSES))
            assert run.process.poll() is None, run.output
            victim = min(killed, key=lambda name: (killed[name], chance.random()))
            killed[victim] += kill_one(run, VICTIMS[victim], chance)
        steps = len(run.steps)
        run.wait_for_steps(steps + 3, START_SECONDS)
        stop = [sys.executable, "-m", "miles_async", "stop", str(run.run_dir)]
        subprocess.run(stop, timeout=120, check=True)
        assert run.wait(60) == 130, run.output
        run.assert_nothing_left()
    assert min(killed.values()) >= 3, killed
    summary = run.summary
    assert summary["balanced"]
    assert summary["age_max"] <= 2
    assert summary["logprob_diff"]["max"] < 1e-4
    assert summary["groups"]["in_flight"] == 0


def kill_one(run: RealRun, mark: str, chance: random.Random) -> bool:
    """One of the processes with ``mark`` in their command line, if there is one at the moment."""
    found = [process for process in run.processes() if is_marked(process, mark)]
    if found:
        chance.choice(sorted(found, key=lambda process: process.pid)).kill()
    return bool(found)


def is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return mark in " ".join(process.cmdline())
    except psutil.Error:
        return False
