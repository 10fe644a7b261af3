"""Exact checkpoints of one training state: model, optimizer, schedule, random generators.

After a load the next step equals, bit by bit, the one that an uninterrupted run would have made. The format is
megatron's dist_checkpointing (torch_dist); every rank writes its part, all ranks take part.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from miles_async.backends.megatron import adam_state
from miles_async.backends.megatron.checkpoint_writer import writing_in_process
from miles_async.errors import CheckpointError

# How the distributed optimizer lays out its state: independent of the number of data-parallel ranks.
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(directory: Path, modules: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Write into ``directory``, which must be absent or empty. Collective. Raises CheckpointError."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if any(directory.iterdir()):
        raise CheckpointError(f"cannot save to {directory}: the directory is not empty")
    dist.barrier()
    state = _state(modules, optimizer, scheduler, loading=False)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    try:
        with writing_in_process():
            dist_checkpointing.save(state, str(directory), strategy)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot save to {directory}: {error}") from error


def load(directory: Path, modules: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Restore what :func:`save` wrote. Collective. Raises CheckpointError if the directory is no such checkpoint."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        what = "holds no trainer checkpoint" if directory.is_dir() else "does not exist"
        raise CheckpointError(f"cannot load from {directory}: it {what}; check --load")
    try:
        state = dist_checkpointing.load(_state(modules, optimizer, scheduler, loading=True), str(directory))
    except (OSError, RuntimeError, dist_checkpointing.core.CheckpointingException) as error:
        raise CheckpointError(f"cannot load from {directory}: {error}") from error
    _inner(modules).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    adam_state.separate_steps(optimizer)
    scheduler.load_state_dict(state["scheduler"])
    _restore_rng(state["rng"])


def _state(modules: list[Any], optimizer: Any, scheduler: Any, *, loading: bool) -> dict[str, Any]:
    model = _inner(modules).sharded_state_dict()
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING),
        "scheduler": scheduler.state_dict(),
        "rng": _sharded_rng(),
    }


def _inner(modules: list[Any]) -> Any:
    assert len(modules) == 1, "virtual pipeline stages are not supported"
    return modules[0].module  # inside of DistributedDataParallel


def _sharded_rng() -> ShardedObject:
    """Every rank's own generators: a (pipeline, tensor, data)-parallel grid of objects."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "model_parallel": get_cuda_rng_tracker().get_states(),
    }
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    position = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("rng", state, shape, position, replica_id=0)


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["model_parallel"])
