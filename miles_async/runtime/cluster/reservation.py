"""Reservation of resources on nodes of the Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from miles_async.runtime.cluster.nodes import alive_nodes

if TYPE_CHECKING:  # Ray is imported when it is used: tools and tests use engines without it
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_POLL_SECONDS = 1.0
_NODE_ID = "ray.io/node-id"  # label that Ray gives every node


class Reservation:
    """A placement group with equal bundles, each on a different node, in the order of the nodes' addresses."""

    def __init__(
        self, bundle: Mapping[str, float], nodes: int, labels: Mapping[str, str], node_ids: Sequence[str] = ()
    ) -> None:
        """``labels``: of nodes that may have a bundle. ``node_ids``: nodes to use; if empty or gone, Ray chooses."""
        self._bundles = [dict(bundle)] * nodes
        self._labels = dict(labels)
        self._node_ids = node_ids
        self._group: PlacementGroup | None = None
        self._order: list[int] = []  # bundles by the address of their nodes

    async def reserve(self, seconds: float) -> bool:
        """Wait for the resources. False, with nothing reserved, if the cluster lacks them at the deadline."""
        from ray.util import placement_group_table

        try:
            async with asyncio.timeout(seconds):
                there = await asyncio.to_thread(self._nodes_are_there)
                self._group = self._ask(there)
                # Not `ready()`: that runs a task, for which Ray starts a worker.
                while not await asyncio.to_thread(self._group.wait, _POLL_SECONDS):
                    if there and not await asyncio.to_thread(self._nodes_are_there):
                        self.release()  # Ray takes half a minute to see that a machine has died
                        there, self._group = False, self._ask(False)
                table = await asyncio.to_thread(placement_group_table, self._group)
                addresses = {node.node_id: node.address for node in await asyncio.to_thread(alive_nodes)}
        except TimeoutError:
            self.release()
            return False
        where: Mapping[int, str] = table["bundles_to_node_id"]
        self._order = sorted(where, key=lambda bundle: (addresses.get(where[bundle], ""), where[bundle]))
        return True

    def on(self, node: int) -> PlacementGroupSchedulingStrategy:
        """The strategy that puts an actor on the node with this number."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._order[node])

    def release(self) -> None:
        """Release everything, which ends remaining actors. Idempotent."""
        from ray.util import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _nodes_are_there(self) -> bool:
        return bool(self._node_ids) and {*self._node_ids} <= {node.node_id for node in alive_nodes()}

    def _ask(self, these_nodes: bool) -> PlacementGroup:
        from ray.util import placement_group

        chosen = [{_NODE_ID: node_id} for node_id in self._node_ids] if these_nodes else None
        selectors = chosen or [self._labels] * len(self._bundles)
        return placement_group(self._bundles, strategy="STRICT_SPREAD", bundle_label_selector=selectors)
