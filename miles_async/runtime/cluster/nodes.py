"""The nodes of the Ray cluster: labels and resources, and the choice of nodes for training and generation.

Ray by itself places requests in order wherever they fit: engines may take half of two nodes, and the trainer finds no
whole node. So both sides are decided together. All GPUs of an engine, or its share of them, lie within a node; nodes of
the trainer have no engines if that can be had; and small parts fill gaps, so that whole nodes stay for large ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

NO_LABELS: Mapping[str, str] = MappingProxyType({})
_SHOWN = ("CPU", "GPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node that is alive."""

    node_id: str
    address: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]

    def __str__(self) -> str:
        has = [f"{amount:g} {name}" for name, amount in self.resources.items() if name in _SHOWN]
        own = [f"{name}={value}" for name, value in self.labels.items() if not name.startswith("ray.io/")]
        return f"{self.address} ({', '.join([*has, *own])})"


def alive_nodes(labels: Mapping[str, str] = NO_LABELS) -> list[Node]:
    """Nodes with all of ``labels``, in an order that is the same for all processes. Asks Ray's head."""
    import ray  # here, since tools and tests use engines without Ray

    nodes = [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            labels=node["Labels"],
            resources=node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(
        (node for node in nodes if labels.items() <= node.labels.items()), key=lambda node: (node.address, node.node_id)
    )


def describe_nodes() -> str:
    return "; ".join(map(str, alive_nodes()))


def free_gpus() -> dict[str, int]:
    """Unused GPUs, by id of their node."""
    from ray._private.state import available_resources_per_node  # Ray 2.60 has no public way to ask per node

    return {node_id: int(resources.get("GPU", 0)) for node_id, resources in available_resources_per_node().items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuNeed:
    """GPUs that the trainer or one engine needs."""

    nodes: int = 1  # different ones
    gpus: int  # on each of them
    labels: Mapping[str, str] = field(default_factory=dict)  # of nodes that may be taken


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChoice:
    """Ids of nodes, by their addresses."""

    trainer: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()  # per engine


def choose_nodes(
    nodes: Sequence[Node], free: Mapping[str, int], trainer: GpuNeed, engines: Sequence[GpuNeed]
) -> NodeChoice | None:
    """Assign trainer and engines to nodes; None if they do not fit. ``free``: unused GPUs by node id.

    Nodes with engines only are preferred to nodes with both; the trainer takes the nodes that it fills best, or the
    emptiest ones if the engines need the gaps.
    """
    for apart in (True, False):
        for tight in (True, False):
            if choice := _choose(nodes, dict(free), trainer, engines, apart=apart, tight=tight):
                return choice
    return None


def _choose(
    nodes: Sequence[Node],
    free: dict[str, int],
    trainer: GpuNeed,
    engines: Sequence[GpuNeed],
    *,
    apart: bool,
    tight: bool,
) -> NodeChoice | None:
    fit_engines = {node.node_id for node in nodes if any(_fits(node, free, need) for need in engines)}
    allowed = [node for node in nodes if _fits(node, free, trainer)]
    sign = 1 if tight else -1
    # Nodes that no engine could have come first.
    allowed.sort(key=lambda node: (node.node_id in fit_engines, sign * free[node.node_id]))
    of_trainer = _take(allowed, free, trainer)
    if of_trainer is None:
        return None
    left = [node for node in nodes if not (apart and node.node_id in of_trainer)]
    of_engines: dict[int, tuple[str, ...]] = {}
    for index in sorted(range(len(engines)), key=lambda index: (-engines[index].gpus, -engines[index].nodes)):
        fitting = [node for node in left if _fits(node, free, engines[index])]
        taken = _take(sorted(fitting, key=lambda node: free[node.node_id]), free, engines[index])
        if taken is None:
            return None
        of_engines[index] = taken
    return NodeChoice(trainer=of_trainer, engines=tuple(of_engines[index] for index in range(len(engines))))


def _fits(node: Node, free: Mapping[str, int], need: GpuNeed) -> bool:
    return need.labels.items() <= node.labels.items() and free.get(node.node_id, 0) >= need.gpus


def _take(candidates: Sequence[Node], free: dict[str, int], need: GpuNeed) -> tuple[str, ...] | None:
    """Take the GPUs from the first candidates; None if there are too few."""
    if len(candidates) < need.nodes:
        return None
    taken = sorted(candidates[: need.nodes], key=lambda node: (node.address, node.node_id))
    for node in taken:
        free[node.node_id] -= need.gpus
    return tuple(node.node_id for node in taken)
