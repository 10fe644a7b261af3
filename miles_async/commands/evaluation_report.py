"""The report of an evaluation: estimates of each data set, from the samples in a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_async.errors import ConfigurationError
from miles_async.evaluation.estimates import CONFIDENCE, Estimate, differences, estimates
from miles_async.runtime.files.run_directory import check_directory
from miles_async.samples.columns import FileNote
from miles_async.samples.reader import read_note, read_summaries, samples_files

REPORT_FILE = "evaluation.json"
METHOD = (
    f"{CONFIDENCE:.0%} intervals over prompts: pass@k by Wilson's score with the effective number of prompts, rewards "
    "and differences by Student's t"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """Results of an evaluation on one data set."""

    rewards: Mapping[str, list[float]]  # prompt → rewards of its samples; complete prompts only
    samples: int
    asked: int  # samples expected, also of prompts that are left out or have none
    left_out: int = 0  # prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The last evaluation of a run, from its samples."""

    run_dir: Path
    note: FileNote
    data_sets: Mapping[str, DataSet]


def evaluated(run_dir: Path) -> Evaluated:
    """Read the last evaluation of a run. Raises ConfigurationError if there is none, DataError for a broken file."""
    check_directory(run_dir)
    files = [file for file in samples_files(run_dir) if file.kind == "eval"]
    if not files:
        raise ConfigurationError(f"{run_dir} has no samples of an evaluation: none ended, or it had --save-samples 0")
    note = read_note(files[-1].path)
    rewards: dict[str, dict[str, list[float]]] = {}
    asked: dict[str, dict[str, int]] = {}
    for row in read_summaries(files[-1].path):
        if row.branch == 0 and row.reward is not None:
            name = row.data_set or ""
            rewards.setdefault(name, {}).setdefault(row.prompt_id, []).append(row.reward)
            asked.setdefault(name, {})[row.prompt_id] = row.samples
    data_sets = {
        name: _data_set(rewards.get(name, {}), asked.get(name, {}), note, total) for name, total in note.asked.items()
    }
    return Evaluated(run_dir=run_dir, note=note, data_sets=data_sets)


def _data_set(rewards: Mapping[str, list[float]], asked: Mapping[str, int], note: FileNote, total: int) -> DataSet:
    """``asked``: samples of each prompt; ``total``: of all.

    If the evaluation went to its end, samples that are absent have failed. Otherwise prompts that lack some are left
    out: the short answers of a prompt come first.
    """
    whole = note.why_fewer is None
    kept = {prompt: found for prompt, found in rewards.items() if whole or len(found) == asked[prompt]}
    return DataSet(
        rewards=kept,
        samples=sum(map(len, rewards.values())),
        asked=total,
        left_out=len(rewards) - len(kept),
    )


def report(found: Evaluated, before: Evaluated | None = None) -> tuple[str, Mapping[str, object]]:
    """Describe an evaluation, and what differs from the one ``before``: as text, and as evaluation.json has it."""
    lines = [] if found.note.why_fewer is None else [f"not all of it: {found.note.why_fewer}"]
    data_sets = {}
    for name, data_set in found.data_sets.items():
        known = estimates(data_set.rewards)
        data_sets[name] = {
            "prompts": len(data_set.rewards),
            "samples": data_set.samples,
            "missing_samples": data_set.asked - data_set.samples,
            "prompts_left_out": data_set.left_out,
            "estimates": {metric: asdict(estimate) for metric, estimate in known.items()},
        }
        lines += [f"{name}: {_counts(data_set)}", *_table(known)]
    record: dict[str, object] = {"run_dir": str(found.run_dir), "confidence": CONFIDENCE, "data_sets": data_sets}
    if before is not None:
        record["against"] = {"run_dir": str(before.run_dir), "data_sets": _differences(found, before, lines)}
    return "\n".join([*lines, METHOD]) + "\n", record


def _differences(found: Evaluated, before: Evaluated, lines: list[str]) -> dict[str, object]:
    """Differences of each data set that both have; ``lines`` gets their text."""
    differ: dict[str, object] = {}
    for name in (name for name in found.data_sets if name in before.data_sets):
        changes = differences(before.data_sets[name].rewards, found.data_sets[name].rewards)
        differ[name] = {metric: asdict(change) for metric, change in changes.items()}
        both = next(iter(changes.values())).prompts if changes else 0
        lines += [f"{name}, minus {before.run_dir} ({both} prompts in both):", *_table(changes, signed=True)]
    return differ


def _counts(data_set: DataSet) -> str:
    missing, left_out = data_set.asked - data_set.samples, data_set.left_out
    return (
        f"{len(data_set.rewards)} prompts, {data_set.samples} samples"
        + (f", {missing} failed or not done" if missing else "")
        + (f", {left_out} prompts without all of their samples left out" if left_out else "")
    )


def _table(known: Mapping[str, Estimate], *, signed: bool = False) -> Iterator[str]:
    form = "+.3f" if signed else ".3f"
    for name, estimate in known.items():
        interval = "no interval: too few prompts, or all alike"
        if estimate.low is not None and estimate.high is not None:
            interval = f"{estimate.low:{form}} to {estimate.high:{form}}"
        yield f"  {name:<9} {estimate.mean:{form}}   {interval}"
