"""Observations of MegatronBackend while experts are replayed; runs inside of rank processes, asserts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch.distributed as dist
from safetensors.numpy import load_file

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.backends.megatron.backend import MegatronBackend
from miles_async.backends.megatron.checkpoints.hf_export import ADAPTER_DIRECTORY
from miles_async.types import TrainBatch, TrainShard
from tests.integration.megatron_scenario import Case, Layout, each_case, make_backend
from tests.integration.toy_batches import ToySample, to_shards, toy_samples

if TYPE_CHECKING:
    import torch

ROLLOUT = AlgorithmArguments(use_rollout_routing_replay=True)
OLD_POLICY = AlgorithmArguments(use_routing_replay=True)

# So far above all gradients that Adam's first step is minus the gradient.
AS_GRADIENT = {"lr": 1e4, "adam_eps": 1e4, "clip_grad": 0.0}


@dataclass(frozen=True)
class Mixture:
    """A model, and the sizes of its routers."""

    directory: Path
    layers: int
    topk: int
    experts: int

    def choices(self, sample: ToySample) -> np.ndarray:
        """uint8 [T, layers × top-k]: any experts, but the same for the same tokens; all 0 for the last."""
        draw = np.random.default_rng(sample.tokens.tolist())
        chosen = [draw.permutation(self.experts)[: self.topk] for _ in range((len(sample.tokens) - 1) * self.layers)]
        rows = np.array(chosen, np.uint8).reshape(-1, self.layers * self.topk)
        return np.concatenate([rows, np.zeros_like(rows[:1])])


@dataclass
class Replayed:
    """On one rank."""

    logprobs: list[tuple[list[int], list[float]]]  # (tokens, log-probs) of each micro-batch; on the last stage
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # by names of Hugging Face
    free_logprobs: list[list[float]] = field(default_factory=list)  # after all, where routers choose
    adapter: dict[str, np.ndarray] = field(default_factory=dict)  # by peft's names


def replaying_shards(
    mixture: Mixture, samples: Sequence[ToySample], ranks: int, micro_batches: int
) -> list[TrainShard]:
    """Shards of one optimizer step, with experts."""
    by_tokens = {sample.tokens.tobytes(): mixture.choices(sample) for sample in samples}

    def routed(batch: TrainBatch) -> TrainBatch:
        sequences = np.split(batch.tokens, batch.offsets[1:-1])
        experts = np.concatenate([by_tokens[tokens.tobytes()] for tokens in sequences])
        return msgspec.structs.replace(batch, routed_experts=experts)

    shards = to_shards([samples], dp_size=ranks, micro_batches=micro_batches)
    return [
        msgspec.structs.replace(
            shard, optimizer_steps=tuple(tuple(map(routed, step)) for step in shard.optimizer_steps)
        )
        for shard in shards
    ]


def observe_replays(
    rank: int,
    world_size: int,
    store: dist.Store,
    models: dict[str, Mixture],
    layouts: dict[str, Layout],
    cases: Sequence[Case],
) -> dict[Case, Replayed | str]:
    """A traceback in place of what failed."""

    def observe(store: dist.Store, case: Case) -> Replayed:
        layout, mixture = layouts[case[0]], models[case[1]]
        backend = make_backend(rank, world_size, store, mixture.directory, layout, ROLLOUT, **AS_GRADIENT)
        samples = toy_samples(12)
        ranks = backend.data_parallel_size
        shard = replaying_shards(mixture, samples, ranks, layout.micro_batches)[backend.data_parallel_rank]
        observed = Replayed(logprobs=_scores(backend, shard))
        before = _weights(backend)
        observed.metrics = backend.train(shard)
        observed.gradients = {name: before[name] - value for name, value in _weights(backend).items()}
        observed.free_logprobs = backend.logprobs([sample.tokens.tolist() for sample in samples])
        if layout.model.get("lora_rank"):
            exported = mixture.directory.parent / "-".join(case)
            backend.save_hf(exported)
            observed.adapter = load_file(exported / ADAPTER_DIRECTORY / "adapter_model.safetensors")
        backend.close()
        return observed

    return each_case(cases, store, observe)


def observe_old_policy(
    rank: int, world_size: int, store: dist.Store, mixture: Mixture, layout: Layout, scale: float
) -> dict[str, np.ndarray]:
    """Weights after two optimizer steps of one batch, each of which moved them by minus ``scale`` × the gradient."""
    settings = {**AS_GRADIENT, "lr": scale * AS_GRADIENT["adam_eps"], "adam_beta1": 0.0}
    backend = make_backend(rank, world_size, store, mixture.directory, layout, OLD_POLICY, **settings)
    samples = toy_samples(12)
    (shard,) = to_shards([samples[:6], samples[6:]], dp_size=1, micro_batches=layout.micro_batches)
    backend.train(shard)
    weights = _weights(backend)
    backend.close()
    return weights


def observe_differences(
    rank: int, world_size: int, store: dist.Store, directory: Path, batch: TrainBatch
) -> dict[str, float]:
    """Mean difference of log-probs to those of the engine, where routers choose and where its experts are taken."""
    from miles_async.backends.megatron.packing.pack import pack_batch

    backend = make_backend(rank, world_size, store, directory, Layout(), ROLLOUT)
    runner, found = backend._runner, {}
    for name, experts in {"free": None, "replayed": batch.routed_experts}.items():
        given = msgspec.structs.replace(batch, routed_experts=experts)
        packed = pack_batch(given, 0, runner.layout, backend.device)
        [logprobs], _ = runner.policy.model.score([packed], runner.scorer.logprobs)
        differences = np.abs(logprobs.numpy() - batch.rollout_logprobs)[batch.loss_mask == 1]
        found[name] = float(differences.mean())
    backend.close()
    return found


def _scores(backend: MegatronBackend, shard: TrainShard) -> list[tuple[list[int], list[float]]]:
    from miles_async.backends.megatron.packing.pack import pack_batch

    runner = backend._runner
    (step,) = shard.optimizer_steps
    packs = [pack_batch(batch, 0, runner.layout, backend.device) for batch in step]
    found, _ = runner.policy.model.score(packs, runner.scorer.logprobs)
    return [(batch.tokens.tolist(), logprobs.tolist()) for batch, logprobs in zip(step, found, strict=False)]


def _weights(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.double().numpy().copy() for name, tensor in backend.export_weights()}
