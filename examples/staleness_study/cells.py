"""The cells of the study: how old the data is × how the loss corrects for it × seed, and their flags."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.staleness_study.corrections import BY_NAME, CORRECTIONS, UNCORRECTED, Correction
from miles_async.arguments.argument_files import expand_argument_files

AGES = (0, 2, 4, 8, 16)
AGES_AS_RUN = (0, 8, 2, 16, 4)  # an unfinished round has whole rows, the most telling ones first
SEEDS = 3
STEPS = 60
COMMON = (
    "@examples/quickstart/sort.args",
    *("--num-rollout", str(STEPS), "--rollout-batch-size", "8"),
    # Strictly in turn, with engines that have the weights of `age` versions ago: ages are exact.
    *("--max-rollout-lead", "1"),
    # What costs processor time and changes nothing: the exported weights are evaluated instead of the engines', which
    # are old at the end, and the trainer's log-probs of age 0 tell whether a publication arrived.
    *("--eval-prompt-data", "--eval-interval", "none"),
    *("--verify-weights", "off", "--no-record", "--no-progress"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of the study."""

    age: int  # weight versions, of everything that is trained on after the first ``age`` steps
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"age{self.age}-{self.correction}-seed{self.seed}"

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags but those that name directories."""
        return (
            *COMMON,
            *("--max-weight-staleness", str(self.age), "--debug-publication-lag", str(self.age)),
            *BY_NAME[self.correction].flags,
            *("--seed", str(1234 + self.seed), "--rollout-seed", str(42 + self.seed)),
        )

    @property
    def fingerprint(self) -> str:
        """Changes with any of the flags, also of those in argument files. Needs the repository's root as directory."""
        words = expand_argument_files(self.flags)
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def run_flags(cell: Cell, run_dir: Path) -> list[str]:
    """All flags of a run of ``cell``, which exports its weights to :func:`exported`."""
    return [*cell.flags, "--run-dir", str(run_dir), "--save-hf", str(exported(run_dir))]


def exported(run_dir: Path) -> Path:
    return run_dir / "hf"


def study_cells(seeds: int) -> Iterator[Cell]:
    """All cells in rounds of one seed, so that an unfinished study has every cell before it has any twice."""
    for seed in range(seeds):
        for age in AGES_AS_RUN:
            for correction in corrections_at(age):
                yield Cell(age=age, correction=correction.name, seed=seed)


def corrections_at(age: int) -> tuple[Correction, ...]:
    """The corrections that have a cell at ``age``."""
    return tuple(one for one in CORRECTIONS if age or one == UNCORRECTED or one.own_learning_rate)
