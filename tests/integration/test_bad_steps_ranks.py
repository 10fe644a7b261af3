"""Optimizer steps that must not happen leave weights, optimizer state and step counters bitwise alone, on all ranks.

# covers: C12
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from miles_async.types import TrainBatch, TrainShard
from tests.integration.megatron_scenario import Layout, make_backend, shard_of
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny_qwen3
from tests.integration.toy_batches import VERSION, ToySample, toy_samples

if TYPE_CHECKING:
    from miles_async.backends.megatron.backend import MegatronBackend

Seen = dict[str, dict[str, Any]]  # what a rank saw, by layout and name

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LAYOUTS = {
    "dp2": Layout(world_size=2, micro_batches=2),
    "tp2": Layout(world_size=2, tensor=2),
    "pp2": Layout(world_size=2, pipeline=2, micro_batches=2),
}
LIMITS = {"grad_norm_limit": 50.0, "max_logprob_diff": 1.0}

Change = Callable[[int, ToySample], ToySample]
"""(number of the sample, sample) → the sample that is trained."""


def only(number: int, **fields: object) -> Change:
    return lambda index, sample: dataclasses.replace(sample, **fields) if index == number else sample


def surprised(age: int) -> Change:
    """Engines found the tokens of this age far less likely."""

    def change(index: int, sample: ToySample) -> ToySample:
        shift = 3.0 if index % 2 == age else 0.0  # as toy_samples() deals out versions
        return dataclasses.replace(sample, rollout_logprobs=sample.rollout_logprobs - np.float32(shift))

    return change


# Each changes samples of one data-parallel rank alone; those of age 0 are all on rank 0.
BAD = {
    "infinite": only(1, advantage=float("inf")),
    "exploding": only(1, advantage=1e6),
    "mismatch": surprised(0),
}
GOOD = {"explained by age": surprised(1)}


# ------------------------------------------------------------------------------------------- in the ranks
def _observe(rank: int, world_size: int, store: dist.Store, directory: Path) -> Seen:
    return {name: _in_layout(rank, dist.PrefixStore(name, store), directory, name) for name in LAYOUTS}


def _in_layout(rank: int, store: dist.Store, directory: Path, layout: str) -> dict[str, object]:
    seen: dict[str, Any] = {}
    for run in ("with", "without"):
        backend = make_backend(rank, 2, dist.PrefixStore(run, store), directory, LAYOUTS[layout], **LIMITS)
        versions = iter(range(VERSION, VERSION + 20))

        def train(
            change: Change, backend: MegatronBackend = backend, versions: Any = versions, version: int | None = None
        ) -> dict[str, float]:
            samples = [change(index, sample) for index, sample in enumerate(toy_samples(12))]
            shard = shard_of(backend, [samples], LAYOUTS[layout].micro_batches)
            return backend.train(_at(shard, version or next(versions)))

        train(only(0))
        if run == "with":
            before = _state(backend)
            for name, change in BAD.items():
                seen[name] = train(change)
                seen[name, "moved"] = [part for part, digest in _state(backend).items() if digest != before[part]]
        for name, change in GOOD.items():
            seen[name] = train(change)
        seen["unpublished"] = train(surprised(0), version=next(versions) - 1)  # the version of the step before
        seen[run] = _state(backend)
        backend.close()
    return seen


def _at(shard: TrainShard, version: int) -> TrainShard:
    """The same, so many versions later."""
    later = version - VERSION

    def moved(batch: TrainBatch) -> TrainBatch:
        return msgspec.structs.replace(
            batch, weight_versions=batch.weight_versions + later, oldest_versions=batch.oldest_versions + later
        )

    steps = tuple(tuple(map(moved, step)) for step in shard.optimizer_steps)
    return msgspec.structs.replace(shard, target_version=version, optimizer_steps=steps)


def _state(backend: MegatronBackend) -> dict[str, str]:
    """Digests of all that a step would change on this rank: weights, masters, moments, step counters."""
    from miles_async.backends.megatron.checkpoints.checkpoint import optimizer_step
    from miles_async.backends.megatron.offload import model_tensors, optimizer_tensors

    tensors: Sequence[Any] = [
        *model_tensors(backend._model.modules),
        *optimizer_tensors(backend._runner.policy.optimizer),
    ]
    digests = {
        f"{number} {tuple(tensor.shape)}": hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for number, tensor in enumerate(tensors)
    }
    return digests | {"steps": str(optimizer_step(backend._runner.policy.optimizer))}


# -------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """By rank, layout and what was trained."""
    return run_ranks(2, _observe, save_tiny_qwen3(tmp_path_factory.mktemp("model") / "qwen3", tied=False))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_step_is_made_by_no_rank(seen: list[Seen], layout: str, name: str) -> None:
    reason = "logprob_diff" if name == "mismatch" else "grad_norm"
    values = []
    for rank in seen:
        assert rank[layout][name, "moved"] == []
        metrics = rank[layout][name]
        assert metrics[f"bad_steps/{reason}"] == metrics["skipped_optimizer_steps"] == 1
        assert [other for other in metrics if other.startswith("bad_steps/")] == [f"bad_steps/{reason}"]
        assert metrics["grad_norm"] == 0
        values.append(metrics[f"bad_{reason}"])
    np.testing.assert_equal(values[0], values[1])
    if name == "mismatch":
        assert values[0] == seen[0][layout][name]["logprob_diff_mean"] > 1.0
    else:
        assert values[0] > 50.0 if name == "exploding" else not np.isfinite(values[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_as_if_a_bad_step_had_not_been_tried(seen: list[Seen], layout: str) -> None:
    for rank in seen:
        assert rank[layout]["with"] == rank[layout]["without"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["explained by age", "unpublished"])
def test_a_difference_that_older_weights_explain_is_no_reason(seen: list[Seen], layout: str, name: str) -> None:
    """Those of an older version, or of the same where the trainer has stepped since engines got it."""
    for rank in seen:
        assert rank[layout][name]["skipped_optimizer_steps"] == 0
        assert rank[layout][name]["grad_norm"] > 0
