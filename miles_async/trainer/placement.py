"""Placement of trainer ranks: as many nodes as were asked for, with as many ranks each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_async.arguments.cluster import Device
from miles_async.errors import TrainerError
from miles_async.runtime.nodes import NO_LABELS, describe_nodes

_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResources:
    """Resources of one rank, and the environment of its process."""

    num_cpus: float
    num_gpus: float
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None  # of torch; None: its default
    interpreter: str | None = None  # command that Ray starts its process with; None: the one of this process
    labels: Mapping[str, str] = field(default_factory=dict)  # of the nodes that may have it

    @classmethod
    def for_device(
        cls,
        device: Device,
        env: Mapping[str, str],
        interpreter: str | None = None,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> RankResources:
        """On CPU a rank is one thread that shares cores with all others."""
        if device == "cuda":
            return cls(num_cpus=1, num_gpus=1, env=env, labels=labels)
        hidden = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # megatron takes CUDA wherever it sees it
        return cls(num_cpus=0.01, num_gpus=0, env={**env, **hidden}, threads=1, interpreter=interpreter, labels=labels)

    def bundle(self, ranks: int) -> dict[str, float]:
        """Resources of several ranks together."""
        return {"CPU": ranks * self.num_cpus} | ({"GPU": ranks * self.num_gpus} if self.num_gpus else {})


class Placement:
    """A placement group with a bundle per node, which holds the ranks of that node: consecutive ones, since they form
    tensor-parallel groups.
    """

    def __init__(self, resources: RankResources, nodes: int, ranks_per_node: int) -> None:
        self._resources = resources
        self._nodes, self._ranks_per_node = nodes, ranks_per_node
        self._group: PlacementGroup | None = None

    async def reserve(self, deadline_seconds: float) -> None:
        """Raises TrainerError when the cluster hasn't got the resources within the deadline."""
        bundle = self._resources.bundle(self._ranks_per_node)
        labels = dict(self._resources.labels)
        self._group = placement_group(
            [bundle] * self._nodes, strategy="STRICT_SPREAD", bundle_label_selector=[labels] * self._nodes
        )
        try:
            async with asyncio.timeout(deadline_seconds):
                # Not `ready()`: that runs a task, for which Ray starts a worker.
                while not await asyncio.to_thread(self._group.wait, _POLL_SECONDS):
                    pass
        except TimeoutError:
            where = f" labelled {labels} (--actor-node-labels)" if labels else ""
            raise TrainerError(
                f"Ray did not find {self._nodes} nodes{where} with {bundle} each for {self._ranks_per_node} trainer "
                f"ranks within {deadline_seconds:g} s; the cluster has {describe_nodes()} (--actor-num-nodes, "
                "--actor-num-gpus-per-node)"
            ) from None

    def options(self, rank: int) -> dict[str, object]:
        """Options of rank ``rank`` for ``ray.remote(...).options``."""
        runtime_env: dict[str, object] = {"env_vars": dict(self._resources.env)}
        if self._resources.interpreter is not None:
            runtime_env["py_executable"] = self._resources.interpreter
        return {
            "num_cpus": self._resources.num_cpus,
            "num_gpus": self._resources.num_gpus,
            "runtime_env": runtime_env,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // self._ranks_per_node
            ),
        }

    def release(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
