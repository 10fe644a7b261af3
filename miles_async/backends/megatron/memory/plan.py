"""Plan the memory of trainer ranks per pipeline stage, from Megatron's own model. Light to import.

:func:`measure` runs :mod:`miles_async.backends.megatron.memory.fake_rank` in a child process; the rest is arithmetic
about Megatron's optimizer.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model import ModelArguments, RecomputeGranularity
from miles_async.backends.megatron.memory.stages import StageMemory, StageRequest
from miles_async.errors import ConfigurationError

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
MEASURE_SECONDS = 600.0  # a deadline, not an estimate: most models take less than ten
RECOMPUTED: tuple[RecomputeGranularity | None, ...] = (None, "selective", "full")
"""Recomputation of activations, from most memory to least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes on one trainer rank of a pipeline stage."""

    stages: range
    weights: int
    gradients: int  # fp32 buffers of DistributedDataParallel
    optimizer: int  # this rank's shard on the GPU: Adam's moments, and the fp32 weights of a bf16 model
    reference: int  # weights of a frozen model
    critic: int  # weights, gradients and optimizer of a second model that is trained
    activations: int  # of all micro-batches that are under way at once
    staging: int  # buckets of exported weights: one is sent while the next is copied
    saved_copy: int  # in host memory, on the first of the data-parallel ranks: what --async-save writes from
    kept_weights: int  # in host memory: trained weights of earlier versions

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        models = (self.weights, self.gradients, self.optimizer, self.reference, self.critic)
        return sum((*models, self.activations, self.staging))


def measure(request: StageRequest) -> Mapping[RecomputeGranularity | None, list[StageMemory]]:
    """Measure the stages in a child process, for each kind of recomputation: about ten seconds.

    Raises ConfigurationError if Megatron refuses the requested kind; others that it refuses are omitted.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare_child) as pool:
        try:
            return pool.submit(_measure, request).result(timeout=MEASURE_SECONDS)
        except FutureTimeoutError as error:
            for process in multiprocessing.active_children():
                process.kill()
            raise ConfigurationError(f"measuring the trainer's memory took over {MEASURE_SECONDS:g} s") from error
        except BrokenProcessPool as error:
            raise ConfigurationError("measuring the trainer's memory failed: its process died") from error


def rank_bytes(
    stage: StageMemory,
    model: ModelArguments,
    world_size: int,
    *,
    reference: bool,
    critic: bool,
    bucket: int,
    copies_saves: bool,
    kept_versions: int = 0,
) -> RankBytes:
    """Sum up one rank. ``reference``, ``critic``: it holds another model, frozen or trained. ``bucket``: bytes of
    ``--update-weight-buffer-size``. ``copies_saves``: it writes checkpoints from a copy of its state.
    ``kept_versions``: weight versions for old log-probs (``kept_weights.py``).

    The critic equals the policy but for its value head. Its activations, which are fewer, do not coexist with the
    policy's.

    Sources: DistributedDataParallel with fp32 gradient buffers and DistributedOptimizer, which shards fp32 copies of
    bf16 weights and Adam's two moments over data-parallel ranks, context-parallel ones included (megatron-core 0.19).
    """
    per_weight = 2 if model.bf16 else 4
    per_shard = state_bytes(model)
    replicas = world_size // (model.tensor_model_parallel_size * model.pipeline_model_parallel_size)
    expert_replicas = world_size // (
        model.expert_tensor_size * model.expert_model_parallel_size * model.pipeline_model_parallel_size
    )
    parameters = stage.parameters + stage.expert_parameters
    trained, expert_trained = stage.parameters, stage.expert_parameters
    if model.freeze_vision_tower:
        trained -= stage.tower
    adapters = 0
    if model.lora_rank:
        trained, expert_trained = stage.adapters, stage.expert_adapters
        adapters = trained + expert_trained

    def optimizer_bytes(shared: int, experts: int) -> int:
        return round(per_shard * (-(-shared // replicas) + -(-experts // expert_replicas)))

    critic_parameters = of_critic = 0
    if critic:
        shared = stage.parameters - stage.ahead - stage.output_layer + stage.value_head
        experts = stage.expert_parameters - stage.expert_ahead
        critic_parameters = shared + experts
        of_critic = (per_weight + 4) * critic_parameters + optimizer_bytes(shared, experts)
    return RankBytes(
        stages=stage.stages,
        weights=per_weight * (parameters + adapters),
        gradients=4 * (trained + expert_trained),
        optimizer=optimizer_bytes(trained, expert_trained),
        reference=per_weight * (parameters - stage.ahead - stage.expert_ahead) if reference else 0,
        critic=of_critic,
        activations=stage.activations,
        staging=2 * bucket,
        # Checkpoints hold the weights (of adapters alone, if there are some), and of trained ones the fp32 copies and
        # both moments, gathered from all replicas.
        saved_copy=(
            per_weight * (adapters or parameters)
            + 12 * (trained + expert_trained)
            + (per_weight + 12) * critic_parameters
        )
        * copies_saves,
        # One more while the newest is added, or while the model has the weights of another version.
        kept_weights=per_weight * (trained + expert_trained) * (kept_versions + 1) if kept_versions else 0,
    )


def state_bytes(model: ModelArguments) -> float:
    """Bytes of optimizer state on the GPU per parameter of a rank's shard.

    Adam's two moments go to the CPU as far as ``--optimizer-cpu-offload`` says; the fp32 copy of bf16 weights goes with
    them only under ``--use-precision-aware-optimizer`` (HybridDeviceOptimizer of megatron-core 0.19).
    """
    chosen = megatron_settings(model.megatron_extra).optimizer
    moments = sum(DTYPE_BYTES[str(chosen.get(name, "fp32"))] for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    copy = 4 if model.bf16 else 0
    fraction = float(str(chosen.get("optimizer_offload_fraction", 1.0))) if chosen.get("optimizer_cpu_offload") else 0.0
    stays = 1 - fraction if chosen.get("use_precision_aware_optimizer") else 1.0
    return copy * stays + moments * (1 - fraction)


def model_parameters(stages: Sequence[StageMemory], model: ModelArguments) -> int:
    """Parameters of the whole model. What tensor-parallel ranks share, norms and routers, counts once per rank."""
    return sum(
        len(stage.stages)
        * (
            (stage.parameters - stage.tower) * model.tensor_model_parallel_size
            + stage.tower
            + stage.expert_parameters * model.expert_tensor_size * model.expert_model_parallel_size
        )
        for stage in stages
    )


def _measure(request: StageRequest) -> dict[RecomputeGranularity | None, list[StageMemory]]:
    from miles_async.backends.megatron.platform import Platform

    platform = Platform.cpu()
    platform.prepare(0)  # before the first import of megatron
    from miles_async.backends.megatron.memory.fake_rank import measure_stages

    found = {request.model.recompute_granularity: measure_stages(request, platform)}
    for granularity in RECOMPUTED:
        if granularity not in found:
            with contextlib.suppress(ConfigurationError):
                found[granularity] = measure_stages(_recomputed(request, granularity), platform)
    return found


def _recomputed(request: StageRequest, granularity: RecomputeGranularity | None) -> StageRequest:
    """The same with this recomputation, as Megatron chooses what belongs to it."""
    defaults = ModelArguments()
    model = replace(
        request.model,
        recompute_granularity=granularity,
        recompute_method=defaults.recompute_method,
        recompute_num_layers=defaults.recompute_num_layers,
        recompute_modules=defaults.recompute_modules,
    )
    return replace(request, model=model)


def _prepare_child() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the platform is the host's: fake tensors need no device
    warnings.simplefilter("ignore")  # what Megatron lacks on a CPU does not matter here
    logging.disable(logging.WARNING)
