"""What is in a batch: rewards, lengths, versions, ages (M3, M18). Of the trained, not of the rejected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_async.train_data.advantages import rewards_of
from miles_async.types import Group, Int32


def batch_metrics(groups: Sequence[Group], target_version: int) -> dict[str, float]:
    """Metrics of the groups of one cut. Versions come from the samples' tokens, not from the groups'
    summaries.

    - ``reward/mean``; ``response_length/{mean,max}`` in tokens, tool output included;
    - ``truncated_ratio``: samples that didn't end by themselves (length limit or abort, so no EOS);
    - ``weight_version/{min,max,mean,std}`` over the tokens that carry loss;
    - ``mixed_version_ratio``: samples whose loss tokens came from several versions;
    - ``age/{mean,max}`` over samples, from their oldest loss token to ``target_version``;
    - ``zero_std/{all_zero,all_one}_percentage``: groups, in percent, whose rewards are all 0 / all 1.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) - sample.prompt_length for sample in samples])
    loss_versions = [sample.weight_versions[sample.loss_mask != 0] for sample in samples]
    versions = np.concatenate(loss_versions)
    oldest = np.array([of_sample.min() for of_sample in loss_versions])
    newest = np.array([of_sample.max() for of_sample in loss_versions])
    ages = target_version - oldest
    return {
        "reward/mean": float(rewards_of(groups).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "truncated_ratio": float(np.mean([sample.finish_reason != "stop" for sample in samples])),
        "weight_version/min": float(versions.min()),
        "weight_version/max": float(versions.max()),
        "weight_version/mean": float(versions.mean()),
        "weight_version/std": float(versions.std()),
        "mixed_version_ratio": float(np.mean(oldest != newest)),
        "age/mean": float(ages.mean()),
        "age/max": float(ages.max()),
        "zero_std/all_zero_percentage": _percentage_all(groups, 0.0),
        "zero_std/all_one_percentage": _percentage_all(groups, 1.0),
    }


def age_histogram(oldest_versions: Int32, target_version: int) -> dict[int, int]:
    """Age in versions → number of samples. ``oldest_versions``: int32 [S], as in ``TrainBatch``."""
    ages, counts = np.unique(target_version - oldest_versions, return_counts=True)
    return {int(age): int(count) for age, count in zip(ages, counts, strict=True)}


def _percentage_all(groups: Sequence[Group], reward: float) -> float:
    return 100.0 * float(np.mean([all(sample.reward == reward for sample in group.samples) for group in groups]))
