"""Placement of trainer ranks: the requested number of nodes, with equally many ranks each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles_async.arguments.cluster import Device
from miles_async.errors import TrainerError
from miles_async.runtime.cluster.nodes import NO_LABELS, describe_nodes
from miles_async.runtime.cluster.reservation import Reservation
from miles_async.runtime.cuda_environment import rank_environment


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResources:
    """Resources of one rank, and the environment of its process."""

    num_cpus: float
    num_gpus: float
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None  # of torch; None: its default
    interpreter: str | None = None  # command for its process; None: this process's
    labels: Mapping[str, str] = field(default_factory=dict)  # of eligible nodes

    @classmethod
    def for_device(
        cls,
        device: Device,
        env: Mapping[str, str],
        interpreter: str | None = None,
        labels: Mapping[str, str] = NO_LABELS,
        *,
        shares_gpu: bool = False,
    ) -> RankResources:
        """On a CPU, a rank is one thread that shares cores with all others. ``shares_gpu``: with engines."""
        if device == "cuda":
            return cls(num_cpus=1, num_gpus=1, env=rank_environment(env, shares_gpu=shares_gpu), labels=labels)
        hidden = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # megatron takes CUDA wherever it sees it
        return cls(num_cpus=0.01, num_gpus=0, env={**env, **hidden}, threads=1, interpreter=interpreter, labels=labels)

    def bundle(self, ranks: int) -> dict[str, float]:
        """Resources of several ranks together."""
        return {"CPU": ranks * self.num_cpus} | ({"GPU": ranks * self.num_gpus} if self.num_gpus else {})


class Placement:
    """Maps ranks to nodes: consecutive ranks share a node, since they form tensor-parallel groups; nodes are in the
    order of their addresses.
    """

    def __init__(self, resources: RankResources, nodes: int, ranks_per_node: int, node_ids: Sequence[str] = ()) -> None:
        """``node_ids``: nodes to use for the ranks; if empty, Ray chooses."""
        self._resources = resources
        self._nodes, self._ranks_per_node = nodes, ranks_per_node
        self._reservation = Reservation(resources.bundle(ranks_per_node), nodes, resources.labels, node_ids)

    async def reserve(self, deadline_seconds: float) -> None:
        """Raises TrainerError if the cluster lacks the resources until the deadline."""
        if not await self._reservation.reserve(deadline_seconds):
            labels = dict(self._resources.labels)
            where = f" labelled {labels} (--actor-node-labels)" if labels else ""
            raise TrainerError(
                f"Ray did not find {self._nodes} nodes{where} with {self._resources.bundle(self._ranks_per_node)} each "
                f"for {self._ranks_per_node} trainer ranks within {deadline_seconds:g} s; the cluster has "
                f"{describe_nodes()} (--actor-num-nodes, --actor-num-gpus-per-node)"
            )

    def options(self, rank: int) -> dict[str, object]:
        """Options of rank ``rank`` for ``ray.remote(...).options``."""
        runtime_env: dict[str, object] = {"env_vars": dict(self._resources.env)}
        if self._resources.interpreter is not None:
            runtime_env["py_executable"] = self._resources.interpreter
        return {
            "num_cpus": self._resources.num_cpus,
            "num_gpus": self._resources.num_gpus,
            "runtime_env": runtime_env,
            "scheduling_strategy": self._reservation.on(rank // self._ranks_per_node),
        }

    def release(self) -> None:
        self._reservation.release()
