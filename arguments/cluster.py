"""Devices, placement, Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag
from miles_async.errors import ConfigurationError

Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto"] | Device

FORWARDED = {
    "PYTHONPATH": "hooks are looked up there",
    "CUDA_HOME": "kernels are compiled at run time",
    "CUDA_DEVICE_MAX_CONNECTIONS": "of trainer ranks, 1 unless it is set: Megatron-core's overlap counts on it",
    "NCCL_*": "interfaces, algorithms, debugging: all members of a group must agree",
    "TORCH_NCCL_*": "PyTorch's watchdog and heartbeat: as for NCCL",
    "GLOO_*": "interface (GLOO_SOCKET_IFNAME)",
    "NVSHMEM_*": "interfaces of DeepEP, which exchanges tokens between experts: as for NCCL",
    "NVTE_*": "Transformer Engine's choice of attention: ranks must agree",
    "CUBLAS_WORKSPACE_CONFIG": "results that can be repeated: ranks must agree",
    "PYTORCH_*": "the allocator's settings (PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF)",
    "SGLANG_*": "settings of engines that have no flag",
    "FLASHINFER_*": "attention kernels of engines, and where they are compiled",
    "TRITON_*": "caches of compiled kernels",
    "TORCHINDUCTOR_*": "as above",
    "HF_*": "caches, mirrors, offline mode, HF_TOKEN",
    "TRANSFORMERS_OFFLINE": "the older name of HF_HUB_OFFLINE",
    "WANDB_*": "hooks that log",
    "*_proxy": "the outside is reached through it; the run's own nodes are added to no_proxy",
    "*_PROXY": "as above",
}
"""Variables that travel by default → why. Not among them: CUDA_VISIBLE_DEVICES, which Ray sets per actor; PATH,
LD_LIBRARY_PATH and HOME, which are each node's own.
"""

MOST_GPUS = 1_000_000
"""Most of a run; more is a slip of the pen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterArguments:
    """Cluster"""

    device: DeviceChoice = flag("auto", "where models run; auto: on CUDA if it is available")
    actor_num_nodes: int = flag(1, "nodes that train", at_least=1, at_most=MOST_GPUS)
    actor_num_gpus_per_node: int = flag(
        1, "trainer ranks per node (on CPU: processes); DP = ranks / (TP × PP × CP)", at_least=1, at_most=MOST_GPUS
    )
    trainer_start_timeout: float = flag(
        600.0, "seconds trainer ranks may take to start and load the model", metavar="SECONDS", above=0
    )
    rollout_num_gpus: int = flag(
        1,
        "GPUs that generate (on CPU: engine processes)",
        replaced_by=("server_groups", "rollout_external"),
        at_least=1,
        at_most=MOST_GPUS,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "GPUs per engine, its tensor-parallel size", replaced_by=("server_groups",), at_least=1
    )
    rollout_num_nodes_per_engine: int = flag(
        1,
        "nodes over which the GPUs of one engine are spread evenly",
        replaced_by=("server_groups",),
        at_least=1,
    )
    colocate: bool = flag(
        False,
        "with --on-policy: trainer and engines take turns on the same GPUs; the side that waits releases its memory",
    )
    gpu_memory_gb: float | None = flag(
        None,
        "GiB that one GPU has: --dry-run and `miles-async plan --memory` refuse what does not fit",
        metavar="GIB",
        above=0,
    )
    ray_address: str | None = flag(
        None,
        "join this Ray cluster (host:port, or auto) instead of starting one on this machine (local); default: "
        "RAY_ADDRESS of the environment, else local",
    )
    actor_node_labels: tuple[str, ...] = flag(
        (), "train only on nodes with these labels (`ray start --labels`)", metavar="NAME=VALUE"
    )
    rollout_node_labels: tuple[str, ...] = flag((), "generate only on nodes with these labels", metavar="NAME=VALUE")
    host: str | None = flag(
        None,
        "address on which the session server, and a router with its own port, listen; set it if agents use another "
        "address than Ray does; default: this machine's address in Ray, 127.0.0.1 without a cluster",
    )
    port_range: str | None = flag(
        None, "ports for servers and rendezvous of this run, on every node; default: any free ones", metavar="LOW-HIGH"
    )
    tls_certificate: Path | None = flag(
        None,
        "PEM file with the certificate of this run's HTTP servers, which then speak TLS only: engines, router, session "
        "server; valid for the addresses of all nodes, at the same path on each",
        metavar="FILE",
    )
    tls_key: Path | None = flag(
        None, "PEM file with the key of --tls-certificate, without a passphrase", metavar="FILE"
    )
    tls_ca: Path | None = flag(
        None,
        "PEM file with the authorities that this run's clients trust for its servers; default: the system's",
        metavar="FILE",
    )
    network_interface: str | None = flag(
        None,
        "interface that gloo and NCCL bind on every node; default: the interface with the node's address in Ray",
        metavar="NAME",
    )
    forward_env: tuple[str, ...] = flag(
        tuple(FORWARDED),
        "environment variables that reach every process of the run on every node; * matches anything. Secrets among "
        "them are kept out of logs",
    )

    @property
    def trainer_world_size(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def ports(self) -> range | None:
        """``port_range`` as numbers. Raises ConfigurationError."""
        return None if self.port_range is None else parse_port_range(self.port_range)

    @property
    def actor_labels(self) -> dict[str, str]:
        """``actor_node_labels`` as a mapping. Raises ConfigurationError."""
        return parse_labels(self.actor_node_labels, "--actor-node-labels")

    @property
    def rollout_labels(self) -> dict[str, str]:
        """``rollout_node_labels`` as a mapping. Raises ConfigurationError."""
        return parse_labels(self.rollout_node_labels, "--rollout-node-labels")

    @property
    def num_engines(self) -> int:
        return self.rollout_num_gpus // max(1, self.rollout_num_gpus_per_engine)  # less is refused elsewhere


def parse_port_range(text: str) -> range:
    """``LOW-HIGH``, both included. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= low <= high <= 65535:
        raise ConfigurationError(f"--port-range {text}: expected LOW-HIGH, two ports, as in 20000-20999")
    return range(low, high + 1)


def parse_labels(words: tuple[str, ...], flag: str) -> dict[str, str]:
    """``NAME=VALUE`` words. Raises ConfigurationError, naming ``flag``."""
    pairs = [word.partition("=") for word in words]
    if wrong := [word for word, (name, _, value) in zip(words, pairs, strict=True) if not (name and value)]:
        raise ConfigurationError(f"{flag} {' '.join(wrong)}: expected NAME=VALUE, as in pool=train")
    return {name: value for name, _, value in pairs}
