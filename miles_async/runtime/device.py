"""Choice of the device that a run's models are on, and of their precision, which depends on it."""

from __future__ import annotations

from dataclasses import replace

from miles_async.arguments.cluster import ClusterArguments, Device, DeviceChoice
from miles_async.arguments.model import ModelArguments


def choose_device(choice: DeviceChoice) -> Device:
    """Resolve ``--device``: auto is CUDA where this machine has it."""
    if choice != "auto":
        return choice
    return "cuda" if count_gpus() else "cpu"


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def with_precision(model: ModelArguments, cluster: ClusterArguments, *, for_gpus: bool = False) -> ModelArguments:
    """Decide ``--bf16`` where no flag does: bf16 on GPUs, as Megatron's recipes train; fp32 on a CPU.

    It assumes GPUs if the device is one, with ``--gpu-memory-gb``, or ``for_gpus``.
    """
    if model.bf16 is not None:
        return model
    return replace(model, bf16=for_gpus or cluster.gpu_memory_gb is not None or choose_device(cluster.device) == "cuda")
