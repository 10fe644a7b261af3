"""What asynchrony buys on the quick start when the environment is slow.

Three real runs of the same task with a lognormal environment latency (σ = 1): strictly on-policy, and asynchronous with
a lead of two and of three batches. From the on-policy run come the seconds that each side needs for one batch by
itself; the larger of the two is the bound that perfect overlap of one batch with one step would reach. (A lead above
two batches may pass it: then the latencies of several batches overlap with each other.)
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.types import JsonObject
from tests.benchmarks.report import RESULTS, ROOT, Row

WARM_UP_STEPS = 3
CELLS = {
    "on-policy": ("--on-policy",),
    "async, lead 2": ("--max-weight-staleness", "2", "--max-rollout-lead", "2"),
    "async, lead 3": ("--max-weight-staleness", "2", "--max-rollout-lead", "3"),
}


def run_cell(name: str, flags: tuple[str, ...], steps: int, directory: Path) -> list[JsonObject]:
    """Train ``steps`` steps; the metrics of those after the warm-up."""
    run_dir = directory / name.replace(", ", "-").replace(" ", "-")
    command = [sys.executable, "-m", "miles_async", "train", "@examples/quickstart/reverse.args"]
    command += ["--run-dir", str(run_dir), "--num-rollout", str(steps), "--no-use-wandb", "--save-hf", "none"]
    command += ["--eval-prompt-data", "none", "--eval-interval", "none", "--rm-type", "none"]
    command += ["--custom-rm-path", "tests.benchmarks.slow_environment:slow_exact_match", *flags]
    print(f"{name}: {steps} steps ...", file=sys.stderr, flush=True)
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{name} failed:\n{finished.stdout}\n{finished.stderr}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "time/step_seconds" in record]
    return trained[WARM_UP_STEPS : steps - 1]  # the last step publishes nothing


def mean(steps: list[JsonObject], *names: str) -> float:
    """Mean over steps of the sum of the named metrics."""
    return statistics.fmean(sum(step[name] for name in names) for step in steps)


def rows(steps: int = 20) -> Iterator[Row]:
    """One per run, when all have ended: they are compared with each other."""
    prepare_quickstart(["--task", "reverse"])
    cells = {name: run_cell(name, flags, steps, RESULTS) for name, flags in CELLS.items()}
    alone = cells["on-policy"]
    rollout_seconds = mean(alone, "time/wait_seconds")  # with the publication that it begins with
    train_seconds = mean(alone, "time/train_seconds", "publish/copy_seconds")
    bound = max(rollout_seconds, train_seconds)
    on_policy_step = mean(alone, "time/step_seconds")
    for name, measured in cells.items():
        step_seconds = mean(measured, "time/step_seconds")
        yield {
            "mode": name,
            "rollout_seconds_alone": round(rollout_seconds, 3),
            "train_seconds_alone": round(train_seconds, 3),
            "step_seconds": round(step_seconds, 3),
            "step_over_bound": round(step_seconds / bound, 3),
            "speed_up": round(on_policy_step / step_seconds, 2),
            "trainer_idle": round(mean(measured, "time/wait_seconds") / step_seconds, 3),
            "mean_age": round(mean(measured, "age/mean"), 2),
        }
