"""Metrics of a trained batch: rewards, lengths, versions, ages (M3, M18); rejected samples don't count."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from miles_async.train_data.batch import BranchTable
from miles_async.types import FinishReason, Group, Int64, Sample


def batch_metrics(groups: Sequence[Group], table: BranchTable, target_version: int) -> dict[str, float]:
    """Metrics of one cut's groups and their table. Versions come from the samples' tokens, not from the groups'
    summaries.

    - ``reward/mean``; ``response_length/{mean,max}`` in tokens of each sample's longest branch, tool output included;
    - ``truncated_ratio``: samples that didn't end by themselves (length limit or abort, so no EOS);
    - ``weight_version/{min,max,mean,std}`` over the tokens that carry loss;
    - ``mixed_version_ratio``: samples whose loss tokens came from several versions;
    - ``age/{mean,max}`` over samples, from their oldest loss token to ``target_version``;
    - ``zero_std/{all_zero,all_one}_percentage``: groups, in percent, whose rewards are all 0 / all 1;
    - ``rollout/aborted_samples``: samples that these groups lost because they became too old in flight;
    - ``rollout/stopped_samples``, ``rollout/length_bias``: see :func:`length_bias`;
    - ``rollout/...``: see :func:`generation_metrics`.
    """
    samples = [sample for group in groups for sample in group.samples]
    firsts = np.flatnonzero(np.diff(table.sample_ids, prepend=-1))  # the first branch of each sample
    lengths = np.maximum.reduceat(table.lengths - table.prompt_lengths, firsts)
    versions, tokens = _count_versions(table)
    mean = np.average(versions, weights=tokens)
    oldest = np.minimum.reduceat(table.oldest_versions, firsts)
    newest = np.maximum.reduceat(table.newest_versions, firsts)
    ages = target_version - oldest
    rewards = table.rewards[firsts]
    starts = np.flatnonzero(np.diff(table.group_ids[firsts], prepend=-1))  # the first sample of each group
    return {
        "reward/mean": float(rewards.mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "truncated_ratio": sum(sample.finish_reason != "stop" for sample in samples) / len(samples),
        "weight_version/min": float(versions.min()),
        "weight_version/max": float(versions.max()),
        "weight_version/mean": float(mean),
        "weight_version/std": math.sqrt(np.average((versions - mean) ** 2, weights=tokens)),
        "mixed_version_ratio": float(np.mean(oldest != newest)),
        "age/mean": float(ages.mean()),
        "age/max": float(ages.max()),
        "zero_std/all_zero_percentage": 100.0 * float(np.logical_and.reduceat(rewards == 0.0, starts).mean()),
        "zero_std/all_one_percentage": 100.0 * float(np.logical_and.reduceat(rewards == 1.0, starts).mean()),
        "rollout/aborted_samples": float(sum(group.aborted for group in groups)),
        **length_bias(groups),
        **generation_metrics(samples),
    }


def length_bias(groups: Sequence[Group]) -> dict[str, float]:
    """Length bias from stopping the slowest samples of groups (``--extra-samples-per-prompt``); {} if none was.

    ``rollout/length_bias``: mean length of the samples ÷ a lower bound of the mean with the stopped ones, each counted
    as long as the longest of its group, which it had outlasted. 1: no bias; less is worse, and the truth may be lower.
    """
    stopped = np.array([group.stopped for group in groups])
    if not stopped.any():
        return {}
    lengths = [np.array([s.longest_response for s in group.samples]) for group in groups]
    total, count = sum(int(of_group.sum()) for of_group in lengths), sum(map(len, lengths))
    longest = np.array([of_group.max() for of_group in lengths])
    at_least = (total + int((stopped * longest).sum())) / (count + int(stopped.sum()))
    return {"rollout/stopped_samples": float(stopped.sum()), "rollout/length_bias": total / count / at_least}


_CALLS = ("turns", "chunks", "constrained_turns")


def generation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of generation, and numbers from the samples' metadata; absent or non-numeric values are left out.

    - ``rollout/finish_reason/{stop,length,abort}``: shares of samples;
    - ``rollout/branches/mean``: per sample; more than 1 where agents edited or truncated their history;
    - ``rollout/turns/{mean,max}``, ``rollout/chunks/mean``: generation calls per trajectory, without and with calls
      that continued an answer which a publication had aborted; ``rollout/constrained_turns/mean``: under a grammar;
    - ``rollout/prefix_cache_hit_rate``: cached_tokens / prompt_tokens, over all generation calls;
    - ``rollout/NAME/mean``: of each NAME in ``metadata["metrics"]``; 0 if absent.
    """
    reasons = Counter(sample.finish_reason for sample in samples)
    found = {f"rollout/finish_reason/{reason}": reasons[reason] / len(samples) for reason in get_args(FinishReason)}
    found["rollout/branches/mean"] = 1 + sum(len(sample.more_branches) for sample in samples) / len(samples)
    noted = {name: _numbers(samples, name) for name in (*_CALLS, "prompt_tokens", "cached_tokens")}
    for name in _CALLS:
        if numbers := noted[name]:
            found[f"rollout/{name}/mean"] = sum(numbers) / len(numbers)
    if noted["turns"]:
        found["rollout/turns/max"] = float(max(noted["turns"]))
    if prompt_tokens := sum(noted["prompt_tokens"]):
        found["rollout/prefix_cache_hit_rate"] = sum(noted["cached_tokens"]) / prompt_tokens
    sums: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        metrics = sample.metadata.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
            sums[str(name)] += _number(value) or 0.0
    return found | {f"rollout/{name}/mean": total / len(samples) for name, total in sums.items()}


def _numbers(samples: Sequence[Sample], name: str) -> list[float]:
    """The samples' usable values of a metadata key: a user's Generate may set anything."""
    values = [value for sample in samples if (value := sample.metadata.get(name)) is not None]
    if set(map(type, values)) <= {int}:  # ours: no need to check each
        return values
    return [number for value in values if (number := _number(value)) is not None]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def age_histogram(table: BranchTable, target_version: int) -> dict[int, int]:
    """Age in versions → number of samples, each as old as its oldest branch."""
    firsts = np.flatnonzero(np.diff(table.sample_ids, prepend=-1))
    ages, counts = np.unique(target_version - np.minimum.reduceat(table.oldest_versions, firsts), return_counts=True)
    return {int(age): int(count) for age, count in zip(ages, counts, strict=True)}


def _count_versions(table: BranchTable) -> tuple[Int64, Int64]:
    """(versions, tokens of each that carry loss), over the whole batch."""
    lowest, highest = int(table.oldest_versions.min()), int(table.newest_versions.max())
    mixed = table.oldest_versions != table.newest_versions
    counts = np.zeros(highest - lowest + 1, dtype=np.int64)
    np.add.at(counts, table.oldest_versions[~mixed] - lowest, table.loss_tokens[~mixed])
    for index in np.flatnonzero(mixed).tolist():
        counts += np.bincount(table.branches[index].loss_versions() - lowest, minlength=len(counts))
    (found,) = counts.nonzero()
    return found + lowest, counts[found]
