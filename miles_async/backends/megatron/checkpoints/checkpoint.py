"""Exact checkpoints of one training state: model, optimizer, schedule, random generators, per-rollout state.

After a load, the next step is bitwise the same as without interruption, with the same flags and layout of ranks. The
format is megatron's dist_checkpointing (torch_dist): every rank writes its part. Tensors are saved whole, whichever
ranks hold their parts, so another layout can load them; random generators belong to ranks, and are seeded again in
another layout.

Only results of training are saved. Values of flags (learning rate, betas, decay) are not, so that flags win; nor is the
frozen model under adapters, which is --hf-checkpoint's.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from miles_async.backends.megatron.adapters.attach import ADAPTER
from miles_async.backends.megatron.checkpoints.checkpoint_writer import StagedSave, as_checkpoint_error
from miles_async.backends.megatron.distributed import complete_parameters, together
from miles_async.backends.megatron.host_buffer import HostBuffer
from miles_async.backends.megatron.optimizer import load_state, parts_of
from miles_async.backends.megatron.per_rollout import PerRollout
from miles_async.errors import CheckpointError
from miles_async.runtime.rank_records import gather_records

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from torch.nn import Module

    from miles_async.backends.megatron.learner import Learner

# Layout of the distributed optimizer's state: by parameter, so that any layout of ranks can load it. Gathered on the
# first of the data-parallel ranks alone, by gloo: gathered on all by NCCL, it takes 12 bytes per parameter of host
# memory on each, and a device buffer as large as the gradients'. Without the prefix, since megatron has one optimizer
# or two (experts apart) depending on the layout.
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def stage_save(
    directory: Path, learner: Learner, per_rollout: PerRollout | None, copies: HostBuffer | None = None
) -> StagedSave:
    """Plan a save. Collective. ``directory`` must be absent or empty. ``copies``: where to copy the state, so that
    training may continue; without, the state must not change before it is written. ``per_rollout``: of the policy.
    """
    with as_checkpoint_error(failure := f"cannot write {directory}"):
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if any(directory.iterdir()):
            raise CheckpointError(f"{failure}: the directory is not empty")
        dist.barrier()
        state = {
            **_parameters(learner, loading=False),
            "optimizer_step": optimizer_step(learner.optimizer),
            "schedule_step": learner.scheduler.num_steps,
            "rng": _sharded_rng(),
            **({} if per_rollout is None else per_rollout.sharded_state()),
        }
        return StagedSave(directory, state, copies)


def save(directory: Path, learner: Learner, per_rollout: PerRollout | None) -> dict[str, str]:
    """Write into ``directory``, which must be absent or empty. Collective. Raises CheckpointError.

    Returns the digests of all ranks' files on rank 0, nothing on the others.
    """
    staged = stage_save(directory, learner, per_rollout)
    parts = gather_records(together(staged.write), bytes)
    return together(lambda: staged.finish(parts) if dist.get_rank() == 0 else {})


def load(
    directory: Path,
    learner: Learner,
    per_rollout: PerRollout | None,
    *,
    seed: int,
    ahead: bool = False,
    tower_frozen: bool = False,
) -> None:
    """Restore a :func:`save`, on the same layout of ranks or another. Collective. Raises CheckpointError.

    Random generators are restored if the numbers of pipeline, tensor, data- and context-parallel ranks are the same,
    else seeded with ``seed`` and the number of steps. ``ahead``: the model has layers for multi-token prediction.
    ``tower_frozen``: its vision tower, if any, is not trained.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        what = "holds no trainer checkpoint" if directory.is_dir() else "does not exist"
        raise CheckpointError(f"cannot read {directory}: it {what}")
    with as_checkpoint_error(f"cannot read {directory}"):
        wanted, found = _parameters(learner, loading=True), load_sharded_metadata(str(directory))
        _check_adapters(adapted=any(map(_is_adapted, wanted["model"].values())), found=_is_adapted(found))
        _check_ahead_layers(trained=ahead, found=any("mtp.layers." in name for name in found))
        _check_tower(found, frozen=tower_frozen)
        rng = _sharded_rng()
        if rng.unique_key in found:
            wanted["rng"] = rng
        if per_rollout is not None:
            wanted |= per_rollout.wanted(found)
        state = dist_checkpointing.load(wanted, str(directory))
        for index, module in _inner(learner).items():
            module.load_state_dict(state["model"][index], strict=not _is_adapted(state["model"][index]))
        load_state(learner.optimizer, state["optimizer"], state["optimizer_step"])
        # An fp32 model has the exact weights in this rank's shard of the optimizer alone, if bf16 was saved.
        complete_parameters(learner.model.modules, always=True)
        learner.scheduler.num_steps = state["schedule_step"]
        learner.scheduler.step(0)  # the flags' rate at this step
        if per_rollout is not None:
            per_rollout.load(state)
    if "rng" in state:
        _restore_rng(state["rng"])
    else:
        seed_all(seed + state["schedule_step"])
        model_parallel_cuda_manual_seed(seed + state["schedule_step"])


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ------------------------------------------------------------------------------------- model and optimizer
def _parameters(learner: Learner, *, loading: bool) -> ShardedStateDict:
    """Sharded state of the model, by virtual pipeline stage, and of its optimizer, by part, on this rank."""
    model = {index: _trained(module.sharded_state_dict()) for index, module in _inner(learner).items()}
    states = learner.optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING)
    if len(parts_of(learner.optimizer)) == 1:
        states = {0: states}
    return {"model": model, "optimizer": {index: states[index]["param_state"] for index in sorted(states)}}


def _trained(state: dict[str, object]) -> dict[str, object]:
    """The adapters of an adapted model, all parameters of any other."""
    return {name: part for name, part in state.items() if ADAPTER in name} if _is_adapted(state) else state


def _is_adapted(names: Iterable[str]) -> bool:
    return any(ADAPTER in name for name in names)


def _check_adapters(*, adapted: bool, found: bool) -> None:
    if adapted is not found:
        raise CheckpointError(
            "it holds the whole model, and with --lora-rank adapters are trained: leave --lora-rank out, or start from "
            "the weights of --save-hf"
            if adapted
            else "it holds adapters, and without --lora-rank the whole model is trained: give the --lora-rank, "
            "--lora-type and --target-modules of that run"
        )


def _check_ahead_layers(*, trained: bool, found: bool) -> None:
    if trained is not found:
        raise CheckpointError(
            "it holds no layers for multi-token prediction: leave --enable-mtp-training out, or start from the weights "
            "of --save-hf"
            if trained
            else "it holds trained layers for multi-token prediction: give --enable-mtp-training, as its run did"
        )


def _check_tower(found: Collection[str], *, frozen: bool) -> None:
    has_tower = any(name.startswith("visual.") for name in found)
    if has_tower and not frozen and not any(".visual." in name for name in found):  # of the optimizer
        raise CheckpointError(
            "its run did not train the vision tower: give --freeze-vision-tower, as that did, or start from the "
            "weights of --save-hf"
        )


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Number of optimizer steps so far, the same for all parameters."""
    return int(parts_of(optimizer)[0].state_dict()["optimizer"]["param_groups"][0].get("step") or 0)


def _inner(learner: Learner) -> dict[str, Module]:
    """The modules inside DistributedDataParallel, by virtual pipeline stage."""
    return {f"{index}": module.module for index, module in enumerate(learner.model.modules)}  # type: ignore[misc]


# ------------------------------------------------------------------------------------------ random generators
class RandomStates(TypedDict):
    """States of all generators of one rank."""

    python: tuple[object, ...]
    numpy: dict[str, object]
    torch: Tensor
    cuda: Tensor | None
    model_parallel: dict[str, Tensor]


def _sharded_rng() -> ShardedObject:
    """Random generators of all ranks: a (pipeline, tensor, context, data)-parallel grid of objects."""
    state: RandomStates = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "model_parallel": get_cuda_rng_tracker().get_states(),
    }
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    position = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("rng", state, shape, position, replica_id=0)


def _restore_rng(state: RandomStates) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["model_parallel"])
