"""How staged weights reach the engines. One file per transport; each implements WeightSender.

Light to import: torch comes in where a sender is made, in the trainer's sending rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_async.weights.transports.distributed import DistributedSender


def make_distributed_sender(address: str, *, device: str, timeout_seconds: float) -> DistributedSender:
    """``device``: "cpu" (gloo) or "cuda" (NCCL), resolved; ``address``: of this node, for the engines."""
    import torch

    from miles_async.weights.transports.distributed import DistributedSender

    return DistributedSender(
        address=address,
        backend="nccl" if device == "cuda" else "gloo",
        device=torch.device(device),
        timeout_seconds=timeout_seconds,
    )
