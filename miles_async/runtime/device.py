"""Choice of the device that a run's models are on."""

from __future__ import annotations

from miles_async.arguments.cluster import Device, DeviceChoice


def choose_device(choice: DeviceChoice) -> Device:
    """Resolve ``--device``: auto is CUDA where this machine has it."""
    if choice != "auto":
        return choice
    return "cuda" if count_gpus() else "cpu"


def count_gpus() -> int:
    """Number of GPUs that CUDA shows on this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
