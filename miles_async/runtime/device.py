"""Which device the models of a run are on."""

from __future__ import annotations


def choose_device(choice: str) -> str:
    """``--device`` as "cpu" or "cuda": auto takes CUDA where this machine has it."""
    if choice != "auto":
        return choice
    return "cuda" if count_gpus() else "cpu"


def count_gpus() -> int:
    """GPUs of this machine that CUDA shows."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
