"""The nodes of the Ray cluster: labels and resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
