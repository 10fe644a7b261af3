"""What the trainer's ranks are made of: the half of the composition root that runs in their processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from arguments import Arguments
from miles_async.backends import create_backend
from miles_async.protocols import TrainBackend, WeightSender
from miles_async.trainer.group import TrainerGroup
from miles_async.trainer.placement import RankResources
from miles_async.weights.export import stage_on_host
from miles_async.weights.verify import canary_tokens


def trainer_group(arguments: Arguments, run_dir: Path, device: str, environment: dict[str, str]) -> TrainerGroup:
    """The trainer of this run, not started."""
    weights = arguments.weights
    verify = weights.verify_weights != "off"
    return TrainerGroup(
        world_size=arguments.cluster.trainer_world_size,
        resources=RankResources.for_device(device, environment),
        backend=partial(make_backend, arguments, device),
        sender=partial(make_sender, device, weights.publication_timeout),
        stage=stage_on_host,
        bucket_bytes=weights.update_weight_buffer_size,
        canary_tokens=canary_tokens(_vocabulary_size(arguments)) if verify else (),
        keep_versions=weights.debug_publication_lag + 1,
        single_node=arguments.cluster.ray_address is None,
        log_directory=run_dir / "logs",
    )


def make_backend(arguments: Arguments, device: str, **rank: Any) -> TrainBackend:
    """The training backend of one rank, in its process; ``rank``: who it is among the others."""
    from miles_async.trainer.losses.policy import GrpoLoss  # torch, which the driver does without

    steps_per_rollout = arguments.rollout.samples_per_rollout // arguments.global_batch_size
    return create_backend(
        arguments.model.train_backend,
        model=arguments.model,
        optimizer=arguments.optimizer,
        total_steps=arguments.rollout.num_rollout * steps_per_rollout,
        temperature=arguments.rollout.rollout_temperature,
        loss=partial(GrpoLoss, arguments.algorithm),
        device=device,
        ref_hf_checkpoint=arguments.algorithm.ref_hf_checkpoint,
        **rank,
    )


def make_sender(device: str, timeout_seconds: float, address: str) -> WeightSender:
    """The trainer's end of the weight transport, in the sending rank's process."""
    import torch

    from miles_async.weights.transports.distributed import DistributedSender

    backend = "nccl" if device == "cuda" else "gloo"
    return DistributedSender(
        address=address, backend=backend, device=torch.device(device), timeout_seconds=timeout_seconds
    )


def _vocabulary_size(arguments: Arguments) -> int:
    assert arguments.model.hf_checkpoint is not None
    config = json.loads((arguments.model.hf_checkpoint / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])
