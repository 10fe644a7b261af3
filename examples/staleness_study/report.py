"""The page of the study, from the results of its cells: tables, what they say, and what they don't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
(`--debug-publication-lag`), so that everything trained on has exactly that age once so many versions exist. Each row is
one [correction](../examples/staleness_study/README.md#corrections), with its published settings where there are any. On
data of age 0 all of them leave the gradient as it is, so there one run stands for all.

**A column is not a clean dose of age.** At age N the first N + 1 of the {steps} steps train on samples of version 0,
since N versions ago there was nothing newer. Their ages grow from 0 to N, and they learn from the starting policy
alone: {share} % of the run at age {oldest}. So columns differ by their start, too.

The second row is a control: no correction, and a learning rate of 1e-4 instead of 5e-4. Where it does as well as a
correction, the harm was done by steps too large for data of that age, and smaller ones are a cure as well.

{finished}

Made by `make study` from [staleness_study.json](staleness_study.json), which has every step of every run.

![Accuracy, spikes and effective sample size by correction and age](staleness_study.png)

## Accuracy

Share of right answers to 256 held-out prompts, by the final weights and taking the likeliest tokens. Before training it
is 0.14.

{accuracy}

Against no correction:

{verdict}

Against the control, with the corrections at their learning rate of 5e-4:

{against_control}

## Reward at the end

Mean reward over the last {reward_steps} steps: of samples at temperature 1, by the weights of as many versions ago as
the data is old. Where training swings, the final weights are a snapshot and this says more.

{reward}

## Spikes of the gradient norm

Steps whose gradient norm (before clipping to 1) is more than {spike:g} times the median of the run, in percent.

{spikes}

## Effective sample size

(Σw)² / (n Σw²) over the n sequences of a step with w = π / π_rollout of a sequence: the share of them that an
importance-weighted mean would count. Mean over the last {last} steps. It says how far the policy is from the one that
sampled, whether or not the correction uses w; a policy that has stopped moving has 1.

{ess}

## What this does not show

- One task, one model of 78 K parameters, answers of five tokens. Products of ratios over thousands of tokens vary far
  more, so corrections by sequence have it easier here than anywhere else.
- One learning rate for the corrections, one batch size, one optimizer step per batch. What an age costs depends on how
  far the policy moves in that many steps: the control shows how much. No correction was run at the control's rate.
- Settings were not tuned, neither per correction nor per age. A correction that does badly may do well with another
  bound.
- Age is constant. Real runs mix ages within a batch, and only there a weight by age such as 0.9^age can tell tokens
  apart: under a constant age it scales every gradient alike, which Adam undoes.
- Engine and trainer compute the same log-probs here (fp32, dense, difference 2e-7). Corrections that are meant for
  numerical mismatch, such as IcePop, are judged by staleness alone.
- "Missing Old Logits" has no row: its π_old, by the weights that sampled each token, has the engines' log-probs where
  the trainer computes the same ones, as here. It is the PPO ratio.
- Orders of batches (`--batch-order`) have no row: they choose among groups that wait, and with exact ages none do.
- SAO's clip is there, SAO is not: its critic and its single samples would change what is learned at age 0, too.
- Accuracy after a fixed number of steps, not after convergence, and not per second: what old data buys in speed is in
  [benchmarks.md](benchmarks.md).
- Three seeds tell large differences from none; they don't rank corrections that are close.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A number of a finished cell, as tables and figure show it."""

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
            f"{finished(results, seeds)} Tables have the mean over seeds, and in brackets the lowest and the highest; "
            "the figure has the means."
        ),
        share=f"{100 * (AGES[-1] + 1) / STEPS:.0f}",
        oldest=AGES[-1],
        accuracy=table(results, ACCURACY, seeds),
        verdict=_items(verdict(results, UNCORRECTED, "no correction")),
        against_control=_items(verdict(results, SMALL_STEPS, "the control")),
        reward_steps=REWARD_STEPS,
        reward=table(results, REWARD, seeds),
        spikes=table(results, SPIKES, seeds),
        ess=table(results, ESS, seeds),
    )
    (docs / PAGE_NAME).write_text(page)
    panels = {
        quantity.title: [[_mean(runs_of(results, one, age), quantity) for age in AGES] for one in CORRECTIONS]
        for quantity in (ACCURACY, SPIKES, ESS)
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


def verdict(results: Sequence[CellResult], reference: Correction, name: str) -> Iterator[str]:
    """A line per age: which corrections are better or worse than ``reference``, judged by ranges over seeds."""
    for age in AGES[1:]:
        plain = [run.greedy for run in runs_of(results, reference, age)]
        if len(plain) < SEEDS_TO_JUDGE:
            yield f"Age {age}: too few seeds to tell corrections apart."
            continue
        better, worse, alike = list[str](), list[str](), 0
        for correction in CORRECTIONS:
            values = [run.greedy for run in runs_of(results, correction, age)]
            if correction == reference or len(values) < SEEDS_TO_JUDGE:
                continue
            if min(values) > max(plain):
                better.append(correction.title)
            elif max(values) < min(plain):
                worse.append(correction.title)
            else:
                alike += 1
        yield (
            f"Age {age}: {name} gives {_entry(plain, ACCURACY, len(plain))}. "
            f"In every seed better than in any of its seeds: {_listed(better)}. "
            f"In every seed worse: {_listed(worse)}. Not told apart from it: {alike}."
        )


def _items(lines: Iterable[str]) -> str:
    return "\n".join(_wrapped(f"- {line}", indent="  ") for line in lines)


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _listed(titles: Sequence[str]) -> str:
    return "; ".join(titles) or "none"
