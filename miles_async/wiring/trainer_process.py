"""Build backend and sender of each rank from flags, in the trainer ranks' processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from miles_async.api import TrainBackend
from miles_async.arguments import Arguments
from miles_async.arguments.cluster import Device
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.model_files import count_elements, read_config
from miles_async.arguments.server_groups import pinned_versions
from miles_async.arguments.weights import Quantization
from miles_async.backends import create_backend
from miles_async.observability.wandb_tracker import report_machine
from miles_async.runtime.cluster.node_files import NodeFiles
from miles_async.runtime.environment import SecretEnvironment, apply_secrets, secret_environment
from miles_async.runtime.files.run_directory import PROFILES, RANKS_FILE
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.processes.fork_server_process import ForkServer
from miles_async.trainer.actor import TrainerActor
from miles_async.trainer.placement import RankResources
from miles_async.trainer.profiling import Profiling
from miles_async.trainer.ranks import TrainerRanks
from miles_async.weights.fp8 import published_bytes
from miles_async.weights.transports.choice import count_senders, make_sender

SHARED_WITH_ENGINES = {"--weight-staging-dir"}
"""Flags of the shared directories whose files engines load."""


def trainer_ranks(
    arguments: Arguments,
    run_dir: Path,
    device: Device,
    environment: Mapping[str, str],
    fork_server: ForkServer | None,
    marks: Mapping[str, Path],
    node_ids: Sequence[str],
) -> TrainerRanks:
    """The trainer of this run, not started. ``fork_server``: what its ranks are forked from. ``marks``: of the
    directories of :func:`shared_directories`. ``node_ids``: its nodes; if empty, Ray chooses.
    """
    weights, network = arguments.weights, Network.of_run(arguments.cluster)
    adapter = arguments.model.lora_adapter_path
    interpreter = fork_server.interpreter(f"ray::{TrainerActor.__name__}") if fork_server is not None else None
    return TrainerRanks(
        world_size=arguments.cluster.trainer_world_size,
        nodes=arguments.cluster.actor_num_nodes,
        node_ids=node_ids,
        resources=RankResources.for_device(
            device,
            environment,
            interpreter,
            arguments.cluster.actor_labels,
            shares_gpu=arguments.cluster.colocate,
        ),
        backend=partial(
            make_backend,
            arguments,
            device,
            secret_environment(arguments.cluster.forward_env),
            NodeFiles(
                present=arguments.model_directories | ({"--lora-adapter-path": adapter} if adapter else {}),
                shared=marks,
                otherwise="keep trainer ranks on the run's machine (--actor-node-labels)",
            ),
        ),
        sender=partial(
            make_sender,
            weights,
            device,
            ports=network.ports,
            version_bytes=_version_bytes(arguments.model, weights.rollout_quantization),
            pinned=pinned_versions(arguments),
        ),
        senders=count_senders(weights, arguments.model.pipeline_model_parallel_size),
        network=network,
        log_directory=run_dir / "logs",
        times_file=run_dir / RANKS_FILE,
        profiling=_profiling(arguments, run_dir),
        start_timeout=arguments.cluster.trainer_start_timeout,
    )


def _profiling(arguments: Arguments, run_dir: Path) -> Profiling | None:
    debug = arguments.debug
    if debug.profile_step is None:
        return None
    return Profiling(
        directory=run_dir.absolute() / PROFILES,
        step=debug.profile_step,
        ranks=debug.profiled_ranks(arguments.cluster.trainer_world_size),
        memory=debug.record_memory_history,
    )


def shared_directories(arguments: Arguments) -> Mapping[str, Path]:
    """Return the directories that other nodes share with the run's machine, by flag. None on one machine, which checks
    them anyway.
    """
    if arguments.cluster.ray_address is None:
        return {}
    checkpoint, weights = arguments.checkpoint, arguments.weights
    named = {
        "--save": checkpoint.save,
        "--load": checkpoint.load,
        "--save-hf": checkpoint.save_hf,
        "--weight-staging-dir": weights.weight_staging_dir if weights.weight_transport == "disk" else None,
    }
    return {flag: path for flag, path in named.items() if path is not None}


def _version_bytes(model: ModelArguments, quantization: Quantization) -> int | None:
    """Bytes of the weights as they are published, by the elements of the model's files; None if unknown."""
    if model.hf_checkpoint is None:
        return None
    try:
        config, elements = read_config(model.hf_checkpoint), count_elements(model.hf_checkpoint)
        return published_bytes(config, elements, item=2 if model.bf16 else 4, quantization=quantization)
    except (OSError, ValueError):
        return None


def report_node(arguments: Arguments, rank: int) -> None:
    """Let the first rank of each node report its machine (``--wandb-shared``)."""
    node, local = divmod(rank, arguments.cluster.actor_num_gpus_per_node)
    if local == 0:
        report_machine(arguments.observability, f"trainer node {node}")


def make_backend(
    arguments: Arguments, device: Device, secrets: SecretEnvironment, files: NodeFiles, *, rank: int, **others: object
) -> TrainBackend:
    """Check ``files``; return the training backend of one rank, in its process. ``others``: who the other ranks are."""
    files.check()
    apply_secrets(secrets)
    report_node(arguments, rank)
    from miles_async.algorithms.objective import make_objective  # needs torch, which the driver must not import

    return create_backend(
        arguments.model.train_backend,
        model=arguments.model,
        optimizer=arguments.optimizer,
        critic=arguments.critic,
        total_steps=arguments.optimizer_steps,
        temperature=arguments.rollout.rollout_temperature,
        objective=partial(make_objective, arguments.algorithm, kept_versions=arguments.staleness.versions),
        device=device,
        ref_hf_checkpoint=arguments.algorithm.ref_hf_checkpoint,
        rank=rank,
        **others,
    )
