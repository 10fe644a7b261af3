"""Placement of trainer ranks: one Ray bundle per rank, ranks of one node next to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_async.arguments.cluster import Device
from miles_async.errors import TrainerError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResources:
    """Resources of one rank, and the environment of its process."""

    num_cpus: float
    num_gpus: float
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None  # of torch; None: its default
    interpreter: str | None = None  # command that Ray starts its process with; None: the one of this process

    @classmethod
    def for_device(cls, device: Device, env: Mapping[str, str], interpreter: str | None = None) -> RankResources:
        """On CPU a rank is one thread that shares cores with all others."""
        if device == "cuda":
            return cls(num_cpus=1, num_gpus=1, env=env)
        hidden = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # megatron takes CUDA wherever it sees it
        return cls(num_cpus=0.01, num_gpus=0, env={**env, **hidden}, threads=1, interpreter=interpreter)

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": self.num_cpus} | ({"GPU": self.num_gpus} if self.num_gpus else {})


class Placement:
    """A placement group and its bundles in rank order."""

    def __init__(self, resources: RankResources, world_size: int) -> None:
        self._resources = resources
        self._world_size = world_size
        self._group: PlacementGroup | None = None
        self._bundles: list[int] = []

    async def reserve(self, deadline_seconds: float) -> None:
        """Raises TrainerError when the cluster hasn't got the resources within the deadline."""
        bundle = self._resources.bundle
        self._group = placement_group([bundle] * self._world_size, strategy="PACK")
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._group.ready()
        except TimeoutError:
            raise TrainerError(
                f"Ray did not place {self._world_size} trainer ranks with {bundle} each within {deadline_seconds:g} s; "
                f"the cluster has {ray.cluster_resources()} (--actor-num-nodes, --actor-num-gpus-per-node)"
            ) from None
        # Consecutive ranks form tensor-parallel groups: they belong on one node.
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self._bundles = sorted(range(self._world_size), key=lambda index: (nodes[index], index))

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
                self._group, placement_group_bundle_index=self._bundles[rank]
            ),
        }

    def release(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
