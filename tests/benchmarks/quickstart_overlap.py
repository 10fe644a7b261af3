"""``make bench``: what asynchrony buys on the quick start when the environment is slow.

Three real runs of the same task with a lognormal environment latency (σ = 1): strictly on-policy, and asynchronous with
a lead of two and of three batches. From the on-policy run come the seconds that each side needs for one batch by
itself; the larger of the two is the bound that perfect overlap of one batch with one step would reach. (A lead above
two batches may pass it: then the latencies of several batches overlap with each other.)

Prints a table and one JSON line; all figures are of this machine, and only their ratios mean something elsewhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.quickstart.prepare import main as prepare_quickstart

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS = 3
CELLS = {
    "on-policy": ("--on-policy",),
    "async, lead 2": ("--max-weight-staleness", "2", "--max-rollout-lead", "2"),
    "async, lead 3": ("--max-weight-staleness", "2", "--max-rollout-lead", "3"),
}


def run_cell(name: str, flags: tuple[str, ...], steps: int, directory: Path) -> list[dict[str, Any]]:
    """Train ``steps`` steps; the metrics of those after the warm-up."""
    run_dir = directory / name.replace(", ", "-").replace(" ", "-")
    command = [sys.executable, "-m", "miles_async", "train", "@examples/quickstart/reverse.args"]
    command += ["--run-dir", str(run_dir), "--num-rollout", str(steps), "--no-use-wandb", "--save-hf", "none"]
    command += ["--eval-prompt-data", "none", "--eval-interval", "none", "--rm-type", "none"]
    command += ["--custom-rm-path", "tests.benchmarks.slow_environment:slow_exact_match", *flags]
    print(f"{name}: {steps} steps ...", flush=True)
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{name} failed:\n{finished.stdout}\n{finished.stderr}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "time/step_seconds" in record]
    return trained[WARM_UP_STEPS : steps - 1]  # the last step publishes nothing


def mean(steps: list[dict[str, Any]], *names: str) -> float:
    """Mean over steps of the sum of the named metrics."""
    return statistics.fmean(sum(step[name] for name in names) for step in steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps per run (default: 20)")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "bench", help="where the runs go")
    options = parser.parse_args()
    prepare_quickstart(["--task", "reverse"])
    cells = {name: run_cell(name, flags, options.steps, options.directory) for name, flags in CELLS.items()}

    alone = cells["on-policy"]
    rollout_seconds = mean(alone, "time/wait_seconds")
    train_seconds = mean(alone, "time/train_seconds", "publish/pause_seconds", "publish/prepare_seconds")
    bound = max(rollout_seconds, train_seconds)
    on_policy_step = mean(alone, "time/step_seconds")
    print(f"\none batch alone: rollout {rollout_seconds:.2f} s, train and publish {train_seconds:.2f} s")
    print(f"{'':<14} {'step s':>7} {'÷ bound':>8} {'speed-up':>9} {'trainer idle':>13} {'mean age':>9}")
    report: dict[str, Any] = {"rollout_seconds": rollout_seconds, "train_seconds": train_seconds, "cells": {}}
    for name, steps in cells.items():
        step_seconds = mean(steps, "time/step_seconds")
        row = {
            "step_seconds": step_seconds,
            "step_over_bound": step_seconds / bound,
            "speed_up_over_on_policy": on_policy_step / step_seconds,
            "trainer_idle_fraction": mean(steps, "time/wait_seconds") / step_seconds,
            "age_mean": mean(steps, "age/mean"),
        }
        report["cells"][name] = row
        print(
            f"{name:<14} {step_seconds:7.2f} {row['step_over_bound']:8.2f} {row['speed_up_over_on_policy']:8.2f}x "
            f"{row['trainer_idle_fraction']:13.0%} {row['age_mean']:9.2f}"
        )
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
