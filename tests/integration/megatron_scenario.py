"""Observations of MegatronBackend in several layouts of ranks; runs inside of rank processes, asserts nothing.

One set of processes goes through all layouts and models: importing megatron costs more than all they do with it.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from miles_async.algorithms.objective import make_objective
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.cluster import DeviceChoice
from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.model import ModelArguments, RecomputeGranularity
from miles_async.arguments.optimizer import EssLrScaling, OptimizerArguments
from miles_async.backends.megatron.backend import MegatronBackend
from miles_async.types import TokenScores, TrainShard
from tests.integration.toy_batches import ToySample, to_shards, toy_samples

LR = 1e-3
SEQUENCES = [np.random.default_rng(1).integers(0, 64, length).tolist() for length in (5, 18, 1, 33, 7, 2, 16)]
NO_CRITIC = CriticArguments()
PLAIN = AlgorithmArguments()
CORRECTED = AlgorithmArguments(use_tis=True, use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1, entropy_coef_end=0.4)
PER_TOKEN = AlgorithmArguments(token_advantages="kl_in_reward", kl_coef=5.0, loss_aggregation="sequence_mean")

Case = tuple[str, str]
"""(layout, model), by name."""


@dataclass(frozen=True)
class Layout:
    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int | None = None  # pipeline stages per rank
    first_stage_layers: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool = True
    micro_batches: int = 1
    model: Mapping[str, object] = field(default_factory=dict)  # further fields of ModelArguments


@dataclass
class Observed:
    """On one rank."""

    logprobs: list[list[float]]
    logprobs_alone: list[list[float]]  # each sequence in a pack of its own
    export_differs: list[str]
    steps: list[dict[str, float]] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)  # of the first rollout step
    logprobs_after: list[list[float]] = field(default_factory=list)
    without_advantages: dict[str, float] = field(default_factory=dict)  # metrics of one more step
    moved: list[str] = field(default_factory=list)  # tensors that this step changed


def make_backend(
    rank: int,
    world_size: int,
    store: dist.Store,
    directory: Path,
    layout: Layout,
    algorithm: AlgorithmArguments = PLAIN,
    *,
    bf16: bool = False,
    recompute: RecomputeGranularity | None = None,
    device: DeviceChoice = "cpu",
    critic: CriticArguments = NO_CRITIC,
    kept_versions: int = 1,
    **optimizer: object,
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
            context_parallel_size=layout.context,
            decoder_first_pipeline_num_layers=layout.first_stage_layers,
            num_virtual_stages_per_pipeline_rank=layout.virtual,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            sequence_parallel=layout.sequence_parallel,
            bf16=bf16,
            **{"recompute_granularity": recompute, "distributed_timeout_minutes": 1, **layout.model},
        ),
        # Chunks of which every micro-batch has several.
        optimizer=OptimizerArguments(**({"lr": LR, "logprob_chunk": 7} | optimizer)),
        critic=critic,
        total_steps=10,
        temperature=1.0,
        objective=partial(make_objective, algorithm, kept_versions=kept_versions),
        device=device,
    )


def each_case(
    cases: Sequence[Case], store: dist.Store, observe: Callable[[dist.Store, Case], object]
) -> dict[Case, Any]:
    """``observe`` of every case, one after another; the traceback of one that fails."""
    seen: dict[Case, Any] = {}
    for case in cases:
        try:
            seen[case] = observe(dist.PrefixStore("/".join(case), store), case)
        except Exception:
            seen[case] = traceback.format_exc()
            leave_groups()
    return seen


def leave_groups() -> None:
    """Do what MegatronBackend.close() does, without a backend."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Training:
    """Settings of the training in observe_training()."""

    directory: Path
    algorithm: AlgorithmArguments = PLAIN
    optimizer_steps: int = 1  # per rollout step and epoch
    epochs: int = 1
    ess_lr_scaling: EssLrScaling | None = None
    exports: bool = True  # observe exported weights, and one more step, without advantages


def observe_training(
    rank: int,
    world_size: int,
    store: dist.Store,
    models: dict[str, Training],
    layouts: dict[str, Layout],
    cases: Sequence[Case],
) -> dict[Case, Observed | str]:
    """A traceback in place of what failed."""

    def observe(store: dist.Store, case: Case) -> Observed:
        return _observe(store, rank, world_size, models[case[1]], layouts[case[0]])

    return each_case(cases, store, observe)


def rollout_steps(optimizer_steps: int) -> list[list[Any]]:
    """Three rollout steps' samples, each cut into optimizer steps."""
    rollouts = [toy_samples(12, seed=seed) for seed in range(3)]
    size = 12 // optimizer_steps
    return [[samples[i : i + size] for i in range(0, 12, size)] for samples in rollouts]


def _observe(store: dist.Store, rank: int, world_size: int, training: Training, layout: Layout) -> Observed:
    backend = make_backend(
        rank,
        world_size,
        store,
        training.directory,
        layout,
        training.algorithm,
        ppo_epochs=training.epochs,
        ess_lr_scaling=training.ess_lr_scaling,
    )
    observed = Observed(
        logprobs=backend.logprobs(SEQUENCES),
        logprobs_alone=[backend.logprobs([sequence])[0] for sequence in SEQUENCES],
        export_differs=export_differences(backend, training.directory) if training.exports else ["not observed"],
    )
    for samples in rollout_steps(training.optimizer_steps):
        observed.steps.append(backend.train(shard_of(backend, samples, layout.micro_batches)))
        observed.scores = observed.scores or [*backend.token_scores()]
    observed.logprobs_after = backend.logprobs(SEQUENCES)
    if training.exports:
        samples = [dataclasses.replace(sample, advantage=0.0) for sample in toy_samples(12)]
        with moving(backend) as observed.moved:
            observed.without_advantages = backend.train(shard_of(backend, [samples], layout.micro_batches))
    backend.close()
    return observed


def shard_of(backend: MegatronBackend, steps: Sequence[Sequence[ToySample]], micro_batches: int) -> TrainShard:
    """This rank's shard of a rollout step: of the samples of each optimizer step."""
    shards = to_shards(steps, dp_size=backend.data_parallel_size, micro_batches=micro_batches)
    return shards[backend.data_parallel_rank]


@contextmanager
def moving(backend: MegatronBackend) -> Iterator[list[str]]:
    """Names of the exported tensors that change meanwhile, once it is over. Collective."""
    before = {name: tensor.clone() for name, tensor in backend.export_weights()}
    names: list[str] = []
    yield names
    names += [name for name, tensor in backend.export_weights() if not tensor.equal(before[name])]


def export_differences(backend: MegatronBackend, directory: Path) -> list[str]:
    """Names that are missing, extra, or not bit by bit what the files of ``directory`` hold."""
    import torch
    from safetensors.torch import load_file

    source = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    exported = dict(backend.export_weights())
    different = [n for n in source if n in exported and not (
        exported[n].dtype == source[n].dtype and torch.equal(exported[n].cpu(), source[n])
    )]  # fmt: skip
    return different + sorted(set(source) ^ set(exported))
