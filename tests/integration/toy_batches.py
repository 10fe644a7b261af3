"""Hand-made samples and TrainShards, without the train_data package: the tests of the trainer stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from miles_async.types import NOT_SHOWN, Picture, TrainBatch, TrainShard

VERSION = 3  # the trainer's, in all of these tests


@dataclass(frozen=True)
class ToySample:
    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    weight_versions: np.ndarray
    advantage: float
    number: int = 0  # in its rollout batch; the same for all branches of a trajectory
    group: int = 0
    pictures: tuple[Picture, ...] = ()

    @property
    def teacher_logprobs(self) -> np.ndarray:
        """Of a teacher that likes even tokens."""
        return np.where(self.tokens % 2, -5.0, -2.0) * self.loss_mask


def toy_samples(count: int, *, vocab: int = 64, seed: int = 0) -> list[ToySample]:
    """Different lengths; prompts that two have each, and a masked stretch inside of every third response, as after a
    tool call.
    """
    draw = np.random.default_rng(seed)
    samples: list[ToySample] = []
    prompt = 0
    for index in range(count):
        own, response = int(draw.integers(1, 6)), int(draw.integers(3, 12))
        prompt = prompt if index % 2 else own
        mask = np.r_[np.zeros(prompt), np.ones(response)].astype(np.uint8)
        if index % 3 == 0:
            mask[prompt + 1] = 0
        versions = np.where(mask, VERSION - index % 2, -1).astype(np.int32)
        tokens = draw.integers(0, vocab, prompt + response).astype(np.int32)
        if index % 2:
            tokens[:prompt] = samples[-1].tokens[:prompt]
        samples.append(
            ToySample(
                tokens=tokens,
                loss_mask=mask,
                rollout_logprobs=(draw.normal(-4.0, 0.3, prompt + response) * mask).astype(np.float32),
                weight_versions=versions,
                advantage=float(draw.normal()),
                number=index,
                group=index // 3,
            )
        )
    return samples


def to_batch(samples: Sequence[ToySample]) -> TrainBatch:
    """One micro-batch; no samples at all make an empty one."""
    count = len(samples)

    def flat(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([getattr(sample, name) for sample in samples] or [np.zeros(0)]).astype(dtype)

    oldest = [sample.weight_versions.max(where=sample.loss_mask == 1, initial=-1) for sample in samples]
    return TrainBatch(
        tokens=flat("tokens", np.int32),
        offsets=np.cumsum([0, *(len(sample.tokens) for sample in samples)]).astype(np.int64),
        loss_mask=flat("loss_mask", np.uint8),
        rollout_logprobs=flat("rollout_logprobs", np.float32),
        weight_versions=flat("weight_versions", np.int32),
        oldest_versions=np.array(oldest, np.int32),
        advantages=np.array([sample.advantage for sample in samples], np.float32),
        rewards=np.zeros(count, np.float32),
        sample_ids=np.array([sample.number for sample in samples], np.int64),
        group_ids=np.array([sample.group for sample in samples], np.int64),
        shown=np.full(count, NOT_SHOWN),
        teacher_logprobs=flat("teacher_logprobs", np.float32),
        pictures=tuple(sample.pictures for sample in samples) if any(sample.pictures for sample in samples) else None,
    )


def to_shards(steps: Sequence[Sequence[ToySample]], *, dp_size: int, micro_batches: int) -> list[TrainShard]:
    """``steps``: the samples of each optimizer step, dealt out to ranks and micro-batches one by one. All are shown."""
    loss_tokens = tuple(sum(int(sample.loss_mask.sum()) for sample in step) for step in steps)
    return [
        TrainShard(
            target_version=VERSION,
            optimizer_steps=tuple(
                tuple(
                    msgspec.structs.replace(
                        to_batch(samples[rank::dp_size][part::micro_batches]),
                        shown=np.arange(len(samples))[rank::dp_size][part::micro_batches] + sum(map(len, steps[:step])),
                    )
                    for part in range(micro_batches)
                )
                for step, samples in enumerate(steps)
            ),
            loss_tokens=loss_tokens,
        )
        for rank in range(dp_size)
    ]


def long_sample_shard(tokens: int, *, ranks: int = 1, micro_batches: int = 1) -> TrainShard:
    """One sample of so many tokens, all of which carry loss, in each micro-batch of each rank: the first rank's."""
    sample = ToySample(
        tokens=np.random.default_rng(0).integers(0, 64, tokens).astype(np.int32),
        loss_mask=np.ones(tokens, np.uint8),
        rollout_logprobs=np.full(tokens, -9.0, np.float32),
        weight_versions=np.full(tokens, 3, np.int32),
        advantage=1.0,
    )
    return to_shards([[sample] * ranks * micro_batches], dp_size=ranks, micro_batches=micro_batches)[0]
