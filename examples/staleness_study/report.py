"""The page of the study, from the results of its cells: table, figure, what they say, and what they don't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from textwrap import fill

from examples.staleness_study.cells import AGES, STEPS, corrections_at
from examples.staleness_study.corrections import CORRECTIONS, SMALL_STEPS, UNCORRECTED, Correction
from examples.staleness_study.figure import draw
from examples.staleness_study.results import LAST_STEPS, REWARD_STEPS, SPIKE, CellResult

SEEDS_TO_JUDGE = 2  # of each of two combinations: with one there is no spread to compare with
LINE = 120
PAGE_NAME, FIGURE_NAME = "staleness_study.md", "staleness_study.png"

PAGE = """\
# What staleness does to learning

Real Megatron and SGLang on CPU teach a model of 78 K parameters to sort four digits: {steps} steps of 8 prompts × 8
samples, learning rate 5e-4, one optimizer step per batch. Engines get the weights of 0, 2, 4, 8 or 16 versions ago
(`--debug-publication-lag`). Each row is one [correction](../examples/staleness_study/README.md#corrections), with its
published settings where there are any. At age 0 none changes the gradient, so one run stands for all.

**A column is not a clean dose of age.** At age N the first N + 1 of the {steps} steps train on samples of version 0,
whose ages grow from 0 to N: {share} % of the run at age {oldest}.

The second row is a control: no correction, and a fifth of the learning rate. Where it does as well as a correction, the
steps were too large for data of that age.

{finished}

Made by `make study` from [staleness_study.json](staleness_study.json), which has every step of every run. [Which
correction](staleness.md#which-correction) to take follows from it.

![Accuracy, reward, spikes and effective sample size by correction and age](staleness_study.png)

- Accuracy: share of right answers to 256 held-out prompts, by the final weights and the likeliest tokens; 0.14 before
  training.
- Reward at the end: mean reward of the last {reward_steps} steps, at temperature 1. Where training swings, it says more
  than the final weights.
- Spikes: steps whose gradient norm (before clipping to 1) is more than {spike:g} times the median of the run.
- Effective sample size: (Σw)² / (n Σw²) over the n sequences of a step, w = π / π_rollout of a sequence, mean over the
  last {last} steps; 1 if the policy has stopped moving.

## Accuracy

{accuracy}

Against no correction, then against the control: `+` better in every seed than in any of its seeds, `−` worse, `=` not
told apart, `?` too few seeds.

{verdict}

## What this does not show

- One task, one model, answers of five tokens: corrections by sequence have it easier than over thousands of tokens.
- One learning rate for the corrections (none ran at the control's), one batch size, one optimizer step per batch.
- Settings were tuned neither per correction nor per age.
- Age is constant. A weight by age then scales every gradient alike, which Adam undoes; real runs mix ages in a batch.
- Engine and trainer compute the same log-probs here (fp32, dense, difference 2e-7), so corrections for numerical
  mismatch, such as IcePop, are judged by staleness alone, and "Missing Old Logits" would be the PPO ratio.
- With exact ages no groups wait, so `--batch-order` has no row. SAO's critic and single samples would change age 0, so
  only its clip has one.
- Accuracy after a fixed number of steps, not after convergence, and not per second: [benchmarks.md](benchmarks.md) has
  what old data buys in speed.
- Three seeds tell large differences from none; they don't rank corrections that are close.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A number of a finished cell, as table and figure show it."""

    title: str
    of: Callable[[CellResult], float]
    decimals: int


ACCURACY = Quantity(title="accuracy", of=lambda result: result.greedy, decimals=2)
REWARD = Quantity(title="reward at the end", of=lambda result: result.last_reward, decimals=2)
SPIKES = Quantity(title="spikes, % of steps", of=lambda result: 100 * result.spikes, decimals=0)
ESS = Quantity(title="effective sample size", of=lambda result: result.last_ess, decimals=2)


def write_report(results: Sequence[CellResult], seeds: int, docs: Path) -> None:
    """Write the page and the figure into ``docs``. ``seeds``: runs per cell that are wanted."""
    docs.mkdir(parents=True, exist_ok=True)
    page = PAGE.format(
        steps=STEPS,
        spike=SPIKE,
        last=LAST_STEPS,
        finished=_wrapped(
            f"{finished(results, seeds)} The table has the mean over seeds and in brackets the lowest and the highest, "
            "the figure the means."
        ),
        share=f"{100 * (AGES[-1] + 1) / STEPS:.0f}",
        oldest=AGES[-1],
        accuracy=table(results, ACCURACY, seeds),
        verdict=verdicts(results),
        reward_steps=REWARD_STEPS,
    )
    (docs / PAGE_NAME).write_text(page)
    panels = {
        quantity.title: [[_mean(runs_of(results, one, age), quantity) for age in AGES] for one in CORRECTIONS]
        for quantity in (ACCURACY, REWARD, SPIKES, ESS)
    }
    draw(panels, [one.title for one in CORRECTIONS], AGES, docs / FIGURE_NAME)


def runs_of(results: Sequence[CellResult], correction: Correction, age: int) -> list[CellResult]:
    return [result for result in results if (result.correction, result.age) == (correction.name, age)]


def finished(results: Sequence[CellResult], seeds: int) -> str:
    """How many of the wanted runs there are, as a sentence."""
    wanted = [(one, age) for age in AGES for one in corrections_at(age)]
    counts = Counter(len(runs_of(results, one, age)) for one, age in wanted)
    if counts[seeds] == len(wanted):
        return f"Each of the {len(wanted)} combinations of age and correction ran with {seeds} seeds."
    parts = [f"{counts[count]} with {count} of {seeds} seeds" for count in range(seeds, -1, -1) if counts[count]]
    return (
        f"**Not finished yet.** Of the {len(wanted)} combinations of age and correction there are {', '.join(parts)}. "
        "Entries with fewer seeds say so; a dash is a combination that has not run."
    )


def table(results: Sequence[CellResult], quantity: Quantity, seeds: int) -> str:
    """A row per correction and a column per age, as Markdown."""
    lines = [f"| age | {' | '.join(map(str, AGES))} |", "|---" * (len(AGES) + 1) + "|"]
    for correction in CORRECTIONS:
        entries = [
            _entry([quantity.of(run) for run in runs_of(results, correction, age)], quantity, seeds)
            if correction in corrections_at(age)
            else ""
            for age in AGES
        ]
        lines.append(f"| {correction.title} | {' | '.join(entries)} |")
    return "\n".join(lines)


def _entry(values: Sequence[float], quantity: Quantity, seeds: int) -> str:
    if not values:
        return "–"
    notes = []
    if len(values) > 1:
        notes.append(f"{min(values):.{quantity.decimals}f}–{max(values):.{quantity.decimals}f}")
    if len(values) < seeds:
        notes.append(f"{len(values)} of {seeds}")
    return f"{mean(values):.{quantity.decimals}f}" + (f" ({'; '.join(notes)})" if notes else "")


def _mean(runs: Sequence[CellResult], quantity: Quantity) -> float | None:
    return mean(map(quantity.of, runs)) if runs else None


def verdicts(results: Sequence[CellResult]) -> str:
    """A row per correction and a column per age, as Markdown: better or worse than no correction and the control."""
    ages = AGES[1:]
    lines = [f"| age | {' | '.join(map(str, ages))} |", "|---" * (len(ages) + 1) + "|"]
    for correction in CORRECTIONS:
        if correction != UNCORRECTED:
            references = (UNCORRECTED,) if correction == SMALL_STEPS else (UNCORRECTED, SMALL_STEPS)
            entries = ["".join(verdict(results, correction, one, age) for one in references) for age in ages]
            lines.append(f"| {correction.title} | {' | '.join(entries)} |")
    return "\n".join(lines)


def verdict(results: Sequence[CellResult], correction: Correction, reference: Correction, age: int) -> str:
    """Judge by the ranges over seeds: ``+`` better, ``−`` worse, ``=`` overlapping, ``?`` too few seeds."""
    values, plain = ([run.greedy for run in runs_of(results, one, age)] for one in (correction, reference))
    if min(len(values), len(plain)) < SEEDS_TO_JUDGE:
        return "?"
    return "+" if min(values) > max(plain) else "−" if max(values) < min(plain) else "="


def _wrapped(text: str) -> str:
    return fill(text, LINE, break_long_words=False, break_on_hyphens=False)
