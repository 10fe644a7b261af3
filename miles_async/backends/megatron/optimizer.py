"""Adam over data-parallel shards, its schedule, and its state where megatron-core 0.19 mishandles it.

Megatron takes the fused Adam of Transformer Engine or Apex where one is installed, which keeps ``step`` once per group
of parameters, and else torch's AdamW, on every machine without CUDA.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.nn import Module

from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron import overrides
from miles_async.backends.megatron.platform import Platform

TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How this rank's models are trained."""

    model: ModelArguments
    optimizer: OptimizerArguments
    platform: Platform
    device: torch.device
    total_steps: int  # optimizer steps of the whole run


def make_optimizer(modules: list[Module], training: Training) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build AdamW over data-parallel shards and the learning-rate schedule."""
    arguments, model = training.optimizer, training.model
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=arguments.lr,
            min_lr=arguments.min_lr,
            weight_decay=arguments.weight_decay,
            adam_beta1=arguments.adam_beta1,
            adam_beta2=arguments.adam_beta2,
            adam_eps=arguments.adam_eps,
            bf16=model.bf16,
            params_dtype=torch.bfloat16 if model.bf16 else torch.float32,
            use_distributed_optimizer=True,
            **overrides.optimizer_values(megatron_settings(model.megatron_extra).optimizer, training.platform),
        ),
        modules,
    )
    index_groups(optimizer)
    count_bucket_ends(optimizer)
    make_state(optimizer)
    return optimizer, make_schedule(optimizer, arguments, training.total_steps)


def make_schedule(
    optimizer: MegatronOptimizer, arguments: OptimizerArguments, total_steps: int
) -> OptimizerParamScheduler:
    """Make the learning-rate schedule of ``total_steps`` optimizer steps, to which a warm-up is limited.

    Step it *before* the optimizer: step k of the warm-up then has k / warm-up of the peak rate, and none has rate 0.
    """
    warm_up = min(arguments.lr_warmup_iters, total_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=arguments.lr,
        min_lr=arguments.min_lr,
        lr_warmup_steps=warm_up,
        # Megatron requires the decay to outlast the warm-up.
        lr_decay_steps=max(total_steps, warm_up + 1),
        lr_decay_style=arguments.lr_decay_style,
        start_wd=arguments.weight_decay,
        end_wd=arguments.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        # The flags of a resumed run win (a longer --num-rollout, say).
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def change_peak(schedule: OptimizerParamScheduler, lr: float) -> None:
    """Continue the schedule with another peak learning rate. Groups of parameters with their own peak keep it."""
    for group in schedule.optimizer.param_groups:
        if group.get("max_lr") == schedule.max_lr:
            group["max_lr"] = lr
    schedule.max_lr = lr


def make_state(optimizer: MegatronOptimizer) -> None:
    """Create the state that the first optimizer step would create.

    Without it, megatron-core 0.19 can't save a checkpoint before the first step, nor load one into a new optimizer.
    """
    for part in parts_of(optimizer):
        adam = part.optimizer
        if isinstance(adam, HybridDeviceOptimizer):
            for each in adam.sub_optimizers:
                _make_zeros(each)
            adam._sync_sub_optimizers_state_to_hdo()
            adam._update_fp32_params_by_new_state = partial(_load_main_weights, adam)
        elif isinstance(adam, TORCH_ADAM):
            _make_zeros(adam)
        elif adam is not None and part.config.use_precision_aware_optimizer:
            # Megatron's init_state_fn omits an argument that Transformer Engine 2.11 requires.
            for parameter in _without_state(adam):
                adam.initialize_state(parameter, adam.store_param_remainders and parameter.dtype == torch.bfloat16)
        elif adam is not None and part.init_state_fn is not None:
            part.init_state_fn(adam, part.config)  # fused Adam: what Megatron calls before a load


def _make_zeros(adam: torch.optim.Optimizer) -> None:
    for parameter in _without_state(adam):
        adam.state[parameter] = {
            "exp_avg": torch.zeros_like(parameter.data),
            "exp_avg_sq": torch.zeros_like(parameter.data),
            **({"step": torch.tensor(0.0)} if isinstance(adam, TORCH_ADAM) else {}),
        }


def _without_state(adam: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in adam.param_groups for parameter in group["params"] if not adam.state[parameter]]


def load_state(optimizer: MegatronOptimizer, states: Mapping[int, object], step: int) -> None:
    """Load the sharded states of the optimizer's parts after ``step`` optimizer steps.

    A load by megatron-core 0.19 makes all parameters of torch's Adam share one tensor ``step``, which each of them
    increments: from the second step after a resume on, its bias correction would run too fast by the number of
    parameters. And it expects that tensor among the sharded states, where it isn't. In an offloaded optimizer the half
    on the GPU would begin each later step with this one's number.
    """
    for index, part in enumerate(parts_of(optimizer)):
        settings = part.state_dict()  # learning rate and the like come from the flags
        for group in settings["optimizer"]["param_groups"]:
            group["step"] = step
        part.load_state_dict(settings)
        for adam, parameter in _torch_adam_parameters(part):
            del adam.state[parameter]["step"]
        part.load_parameter_state_from_fully_reshardable(states[index])
        for adam, parameter in _torch_adam_parameters(part):
            adam.state[parameter]["step"] = torch.tensor(float(step))
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            for group in part.optimizer.param_groups:  # they replace those of the halves, which count, before each step
                group.pop("step", None)


def _load_main_weights(adam: HybridDeviceOptimizer) -> None:
    """Fill the main weights of every parameter from the state, in place of a method that does so in a load.

    That one (megatron-core 0.19) looks for fp32 copies only, and fails with a KeyError for parameters that are fp32
    themselves and have none.
    """
    for parameter, state in adam.state.items():
        adam.param_to_inner_param[parameter].data.copy_(state["master_param"])


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """Norm over all ranks of the gradients that ``prepare_grads()`` has made. Collective.

    Megatron-core's own (0.19.2) waits for the GPU at each gradient: Transformer Engine (2.11) lacks a function without
    which it does not use that package's.
    """
    total = torch.zeros((), device=device)
    for part in parts_of(optimizer):
        norm = torch.nn.utils.get_total_norm(part.get_grads_for_grad_norm())
        square = norm.to(device, torch.float32).square()
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        total += square
    return math.sqrt(total)


@torch.no_grad()
def clip_gradients(optimizer: MegatronOptimizer, norm: float, largest: float) -> None:
    """Scale gradients of this ``norm`` to the ``largest`` one, 0 for no bound; in few launches."""
    factor = largest / (norm + 1e-6)
    # With --use-precision-aware-optimizer they are in another attribute.
    found = (
        getattr(each, "decoupled_grad", None) if each.grad is None else each.grad for each in optimizer.get_parameters()
    )
    if 0 < factor < 1 and (gradients := [each for each in found if each is not None]):
        torch._foreach_mul_(gradients, factor)


def _torch_adam_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    for part in parts_of(optimizer):
        adam = part.optimizer
        if isinstance(adam, TORCH_ADAM):
            for group in adam.param_groups:
                yield from ((adam, parameter) for parameter in group["params"])


def index_groups(optimizer: MegatronOptimizer) -> None:
    """Map each parameter to its optimizer state.

    DistributedOptimizer (megatron-core 0.19) puts a group's fp32 parameters first, but numbers all in order of
    appearance: with both in one group, checkpoints would mix up their states.
    """
    for part in parts_of(optimizer):
        for index, groups in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for order, parameter in enumerate(itertools.chain(*groups)):
                part.model_param_group_index_map[parameter] = index, order


def count_bucket_ends(optimizer: MegatronOptimizer) -> None:
    """Count the padding after a bucket of parameters that another bucket follows.

    Checkpoints of megatron-core 0.19 join buckets without it, and find parameters at positions that include it: a load
    would shift the later buckets' values, such as a tied embedding's, which has its own bucket on pipeline stages.
    """
    for buffer in (buffer for part in parts_of(optimizer) for buffer in getattr(part, "buffers", ())):
        for bucket in buffer.buckets[:-1]:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers inside: dense layers and experts have one each if they are sharded differently."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
