"""Devices, placement, Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_async.arguments.flag import flag

Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto"] | Device


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterArguments:
    """Cluster"""

    device: DeviceChoice = flag("auto", "where models run; auto takes CUDA if there is any")
    actor_num_nodes: int = flag(1, "nodes that train")
    actor_num_gpus_per_node: int = flag(1, "trainer ranks per node (on CPU: processes); DP = ranks / (TP × PP)")
    rollout_num_gpus: int = flag(1, "GPUs that generate (on CPU: engine processes)")
    rollout_num_gpus_per_engine: int = flag(1, "GPUs per engine, its tensor-parallel size")
    ray_address: str | None = flag(
        None,
        "join this Ray cluster (host:port, or auto) instead of starting one on this machine (local); default: "
        "RAY_ADDRESS of the environment, else local",
    )
    forward_env: tuple[str, ...] = flag(
        ("PYTHONPATH", "CUDA_HOME", "NCCL_*", "GLOO_*", "HF_HOME", "WANDB_*"),
        "environment variables that reach every Ray worker; * matches any ending",
    )

    @property
    def trainer_world_size(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_engines(self) -> int:
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine
