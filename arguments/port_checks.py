"""Check that ``--port-range`` has the ports that one node is certain to need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from miles_async.arguments import Arguments
from miles_async.arguments.server_groups import ServerGroup, of_role, server_groups
from miles_async.errors import ConfigurationError


def check_ports(arguments: Arguments) -> Iterator[str]:
    """Check that the first node with trainer ranks, which is the only one without a cluster, has enough ports."""
    cluster = arguments.cluster
    try:
        ports, groups = cluster.ports, server_groups(arguments)
    except ConfigurationError:  # reported by the checks of these flags
        return
    if ports is None or arguments.sides != "both":
        return
    taken = _taken_by_ranks(arguments, groups)
    if cluster.ray_address is None:
        taken |= _taken_by_rollouts(arguments, groups)
    if len(ports) < (needed := sum(taken.values())):
        each = ", ".join(f"{count} for {purpose}" for purpose, count in taken.items())
        yield (
            f"--port-range {cluster.port_range}: expected at least {needed} ports, for a node with trainer ranks "
            f"({each}), found {len(ports)}: give a wider range"
        )


def _taken_by_ranks(arguments: Arguments, groups: Sequence[ServerGroup]) -> dict[str, int]:
    """Ports on the first node with trainer ranks, by purpose."""
    cluster, weights = arguments.cluster, arguments.weights
    taken = {"the rendezvous of ranks": 1}
    if weights.weight_transport == "distributed":
        senders = ceil(arguments.model.pipeline_model_parallel_size / cluster.actor_num_nodes)
        at_once = weights.rolling_engines if weights.publish_order == "rolling" else None
        fleets = (of_role(groups, "train"), of_role(groups, "evaluation"))
        engines = [sum(group.num_engines for group in fleet) for fleet in fleets]
        sets = sum(ceil(count / (at_once or count)) for count in engines if count)
        taken |= {"weights": senders * sets, "weights of engines under repair": senders}
    return taken


def _taken_by_rollouts(arguments: Arguments, groups: Sequence[ServerGroup]) -> dict[str, int]:
    """Ports on the one node of a run without a cluster, by purpose."""
    routers = [
        arguments.engines.sglang_router_port is None,
        bool(of_role(groups, "evaluation")),
        *(group.port is None for group in of_role(groups, "frozen")),
    ]
    taken = {
        "routers": sum(routers),
        "engines": 2 * sum(group.engines for group in groups if not group.external),
        "the session server": arguments.sessions.session_server_workers if arguments.sessions.runs_agent else 0,
    }
    return {purpose: count for purpose, count in taken.items() if count}
