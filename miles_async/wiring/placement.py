"""Nodes for the GPUs of a run: trainer and engines together, before either starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import Device
from miles_async.arguments.server_groups import server_groups
from miles_async.engines.placement import EnginePlace
from miles_async.errors import ConfigurationError
from miles_async.runtime.clock import now
from miles_async.runtime.cluster.nodes import GpuNeed, NodeChoice, alive_nodes, choose_nodes, free_gpus

log = structlog.get_logger(__name__)

OWN_SECONDS = 10.0  # for Ray to count the GPUs of a machine that only this run uses
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlacement:
    """The chosen places. Empty on CPU, where processes share cores anyway."""

    trainer: tuple[str, ...] = ()  # ids of nodes
    engines: Mapping[str, tuple[EnginePlace, ...]] = field(default_factory=dict)  # group → of each of its engines


async def place_run(arguments: Arguments, device: Device) -> RunPlacement:
    """Choose nodes, waiting up to ``--engine-start-timeout`` for GPUs that other jobs of a cluster have, or that its
    autoscaler adds. Raises ConfigurationError if there is no room.
    """
    if device != "cuda":
        return RunPlacement()
    trainer, groups = gpu_needs(arguments)
    engines = [need for needs in groups.values() for need in needs]
    joined = arguments.cluster.ray_address is not None
    choice, there_is = await _wait(trainer, engines, arguments.engines.engine_start_timeout if joined else OWN_SECONDS)
    if choice is None:
        raise ConfigurationError(
            f"expected {_named(trainer)} for the trainer (--actor-num-nodes, --actor-num-gpus-per-node) and "
            f"{', '.join(f'{len(needs)} × {_named(needs[0])}' for needs in groups.values() if needs) or 'none'} for "
            f"engines (--rollout-num-gpus, --rollout-num-gpus-per-engine), found {there_is}"
        )
    places = iter(choice.engines)
    return RunPlacement(
        trainer=choice.trainer,
        engines={name: tuple(EnginePlace(node_ids=next(places)) for _ in needs) for name, needs in groups.items()},
    )


def gpu_needs(arguments: Arguments) -> tuple[GpuNeed, Mapping[str, list[GpuNeed]]]:
    """GPUs for the trainer, and for the engines of each group that this run starts on separate GPUs."""
    cluster, sides = arguments.cluster, arguments.sides
    nodes = cluster.actor_num_nodes if sides != "rollout" else 0
    trainer = GpuNeed(nodes=nodes, gpus=cluster.actor_num_gpus_per_node, labels=cluster.actor_labels)
    if cluster.colocate:
        return trainer, {}
    groups = {
        group.name: [
            GpuNeed(
                nodes=group.nodes_per_engine,
                gpus=group.gpus_per_engine // group.nodes_per_engine,
                labels=cluster.rollout_labels,
            )
        ]
        * group.engines
        for group in server_groups(arguments)
        if not group.external and sides != "trainer"
    }
    return trainer, groups


async def _wait(trainer: GpuNeed, engines: list[GpuNeed], seconds: float) -> tuple[NodeChoice | None, str]:
    """The choice, or None if time runs out, and the available GPUs."""
    deadline = now() + seconds
    choice, there_is = await asyncio.to_thread(_choose, trainer, engines)
    if choice is not None:
        return choice, there_is
    from ray.autoscaler.sdk import request_resources

    log.warning("waiting for GPUs", seconds=seconds, there_is=there_is)
    bundles = [{"GPU": need.gpus} for need in (trainer, *engines) for _ in range(need.nodes)]
    await asyncio.to_thread(request_resources, bundles=bundles)
    try:
        while choice is None and now() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            choice, there_is = await asyncio.to_thread(_choose, trainer, engines)
    finally:
        await asyncio.to_thread(request_resources, bundles=[])
    return choice, there_is


def _choose(trainer: GpuNeed, engines: list[GpuNeed]) -> tuple[NodeChoice | None, str]:
    nodes, free = alive_nodes(), free_gpus()
    there_is = "; ".join(f"{node}, {free.get(node.node_id, 0)} GPUs free" for node in nodes)
    return choose_nodes(nodes, free, trainer, engines), there_is


def _named(need: GpuNeed) -> str:
    where = f"{need.nodes} nodes with {need.gpus} GPUs each" if need.nodes > 1 else f"{need.gpus} GPUs of one node"
    labels = " ".join(f"{name}={value}" for name, value in need.labels.items())
    return f"{where} labelled {labels}" if labels else where
