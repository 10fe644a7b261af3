"""The cells of the study: how old the data is × how the loss corrects for it, and how one is run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_async.observability.metrics_file import FILE_NAME, read_metrics

STEPS = 70
LAST_STEPS = 10  # reward is averaged over so many steps at the end
AGES = (0, 2, 8)
CORRECTIONS = {
    "uncorrected": ("--no-use-rollout-logprobs", "--allow-uncorrected-off-policy"),
    "tis": ("--no-use-rollout-logprobs", "--use-tis"),
    "ppo-ratio": ("--use-rollout-logprobs",),
}
SHUTDOWN_SECONDS = 90  # what an interrupted run may take to stop its engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of the study."""

    age: int  # weight versions, of everything that is trained on after the first ``age`` steps
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"age{self.age}-{self.correction}-seed{self.seed}"

    def flags(self, run_dir: Path) -> list[str]:
        """Strictly in turn (lead 1) and engines with the weights of ``age`` versions ago: ages are exact."""
        return [
            "@examples/quickstart/sort.args",
            *("--num-rollout", str(STEPS), "--rollout-batch-size", "16"),
            *("--max-weight-staleness", str(self.age), "--max-rollout-lead", "1"),
            *("--debug-publication-lag", str(self.age)),
            *CORRECTIONS[self.correction],
            *("--seed", str(1234 + self.seed), "--rollout-seed", str(42 + self.seed)),
            *("--eval-interval", "none", "--run-dir", str(run_dir), "--no-progress"),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """What a finished cell learned."""

    cell: Cell
    rewards: tuple[float, ...]  # per step
    greedy: float  # accuracy on the test prompts at the end
    age_histogram: dict[str, int]

    @property
    def last_reward(self) -> float:
        """Mean sampled reward of the last ten steps."""
        last = self.rewards[-LAST_STEPS:]
        return sum(last) / len(last)


def study_cells(seeds: int) -> Iterator[Cell]:
    """All cells. At age 0 both corrections weigh every token by 1, so that is one cell and not three."""
    for seed in range(seeds):
        for age in AGES:
            for correction in CORRECTIONS if age else ("uncorrected",):
                yield Cell(age=age, correction=correction, seed=seed)


def read_result(cell: Cell, run_dir: Path) -> CellResult | None:
    """The result of a finished cell, or None if there is none yet."""
    try:
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    except FileNotFoundError:
        return None
    if summary["steps"] != STEPS or summary["eval_accuracy_last"] is None:
        return None
    rows = [row for row in read_metrics(run_dir / FILE_NAME) if row.get("reward/mean") is not None]
    return CellResult(
        cell=cell,
        rewards=tuple(row["reward/mean"] for row in rows),
        greedy=summary["eval_accuracy_last"],
        age_histogram=summary["age_histogram"],
    )


def console_log(run_dir: Path) -> Path:
    """Beside the run directory, which starts empty."""
    return run_dir.with_name(f"{run_dir.name}.log")


def run_cell(cell: Cell, run_dir: Path) -> int:
    """Runs the cell from its beginning and returns its exit code; its output goes to :func:`console_log`."""
    shutil.rmtree(run_dir, ignore_errors=True)  # half a run: metrics.jsonl would get two beginnings
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with console_log(run_dir).open("w") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "miles_async", "train", *cell.flags(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait()
        except KeyboardInterrupt:  # it got the signal too: let it stop its engines, then stop as well
            process.wait(SHUTDOWN_SECONDS)
            raise
