"""What is observed of MegatronBackend in one layout of ranks; runs inside of rank processes, asserts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from arguments.algorithm import AlgorithmArguments
from arguments.model import ModelArguments
from arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.backend import MegatronBackend
from miles_async.trainer.losses.policy import GrpoLoss
from tests.integration.toy_batches import to_shards, toy_samples

LR = 1e-3
SEQUENCES = [np.random.default_rng(1).integers(0, 64, length).tolist() for length in (5, 18, 1, 33, 7, 2, 16)]
PLAIN = AlgorithmArguments()
CORRECTED = AlgorithmArguments(use_tis=True, use_kl_loss=True, kl_loss_coef=0.3)


@dataclass(frozen=True)
class Layout:
    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = True
    micro_batches: int = 1


@dataclass
class Observed:
    """On one rank."""

    logprobs: list[list[float]]
    logprobs_alone: list[list[float]]  # each sequence in a pack of its own
    export_differs: list[str]
    steps: list[dict[str, float]] = field(default_factory=list)
    logprobs_after: list[list[float]] = field(default_factory=list)


def make_backend(
    rank: int,
    world_size: int,
    store: dist.Store,
    directory: Path,
    layout: Layout,
    algorithm: AlgorithmArguments = PLAIN,
    *,
    bf16: bool = False,
    **optimizer: Any,
) -> MegatronBackend:
    return MegatronBackend(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        store=store,
        model=ModelArguments(
            hf_checkpoint=directory,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            sequence_parallel=layout.sequence_parallel,
            bf16=bf16,
        ),
        optimizer=OptimizerArguments(**({"lr": LR} | optimizer)),
        total_steps=10,
        temperature=1.0,
        loss=partial(GrpoLoss, algorithm),
        device="cpu",
        timeout_seconds=60,
    )


def observe(
    rank: int, world_size: int, store: dist.Store, models: dict[str, Path], layout: Layout
) -> dict[str, Observed]:
    """Both models: ``tied`` with the plain loss, ``untied`` with TIS, KL and two optimizer steps per rollout."""
    tied = _observe(dist.PrefixStore("tied", store), rank, world_size, models["tied"], layout, PLAIN, steps=1)
    untied = _observe(dist.PrefixStore("untied", store), rank, world_size, models["untied"], layout, CORRECTED, steps=2)
    return {"tied": tied, "untied": untied}


def rollout_steps(optimizer_steps: int) -> list[list[Any]]:
    """Three rollout steps' samples, each cut into optimizer steps."""
    rollouts = [toy_samples(12, seed=seed) for seed in range(3)]
    size = 12 // optimizer_steps
    return [[samples[i : i + size] for i in range(0, 12, size)] for samples in rollouts]


def _observe(
    store: dist.Store,
    rank: int,
    world_size: int,
    directory: Path,
    layout: Layout,
    algorithm: AlgorithmArguments,
    *,
    steps: int,
) -> Observed:
    backend = make_backend(rank, world_size, store, directory, layout, algorithm)
    observed = Observed(
        logprobs=backend.logprobs(SEQUENCES),
        logprobs_alone=[backend.logprobs([sequence])[0] for sequence in SEQUENCES],
        export_differs=export_differences(backend, directory),
    )
    for samples in rollout_steps(steps):
        shards = to_shards(samples, dp_size=backend.data_parallel_size, micro_batches=layout.micro_batches)
        observed.steps.append(backend.train(shards[backend.data_parallel_rank]))
    observed.logprobs_after = backend.logprobs(SEQUENCES)
    backend.close()
    return observed


def export_differences(backend: MegatronBackend, directory: Path) -> list[str]:
    """Names that are missing, extra, or not bit by bit what the checkpoint's files hold."""
    import torch
    from safetensors.torch import load_file

    source = load_file(directory / "model.safetensors")
    exported = dict(backend.export_weights())
    different = [n for n in source if n in exported and not (
        exported[n].dtype == source[n].dtype and torch.equal(exported[n].cpu(), source[n])
    )]  # fmt: skip
    return different + sorted(set(source) ^ set(exported))
