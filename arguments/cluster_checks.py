"""Checks of ranks, engines, ports and addresses: what runs where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.problems import given, refusal
from miles_async.arguments.server_groups import ServerGroup, has_attention_groups, of_role, server_groups
from miles_async.errors import ConfigurationError


def check_ranks(arguments: Arguments) -> Iterator[str]:
    """Check that ranks divide into model replicas, and that several nodes have a cluster."""
    model, cluster = arguments.model, arguments.cluster
    if cluster.actor_num_nodes > 1 and cluster.ray_address is None:
        yield (
            f"--actor-num-nodes {cluster.actor_num_nodes} without --ray-address: Ray would be started on this machine "
            "alone; start a Ray cluster and name it, or train on one node"
        )
    replica = model.ranks_per_replica
    context = f" × --context-parallel-size {model.context_parallel_size}" if model.context_parallel_size > 1 else ""
    if cluster.trainer_world_size % replica:
        yield (
            f"{cluster.trainer_world_size} trainer ranks (--actor-num-nodes {cluster.actor_num_nodes} × "
            f"--actor-num-gpus-per-node {cluster.actor_num_gpus_per_node}) do not divide into replicas of {replica} "
            f"(--tensor-model-parallel-size {model.tensor_model_parallel_size} × --pipeline-model-parallel-size "
            f"{model.pipeline_model_parallel_size}{context}): change one of them"
        )
    experts = model.expert_tensor_size * model.expert_model_parallel_size * model.pipeline_model_parallel_size
    if experts != replica and cluster.trainer_world_size % experts:
        yield (
            f"{cluster.trainer_world_size} trainer ranks do not divide into sets of experts on {experts} ranks "
            f"(--expert-tensor-parallel-size {model.expert_tensor_size} × "
            f"--expert-model-parallel-size {model.expert_model_parallel_size} × "
            f"--pipeline-model-parallel-size {model.pipeline_model_parallel_size}): change one of them"
        )


def check_engine_sizes(arguments: Arguments) -> Iterator[str]:
    """Check that the GPUs that generate divide into engines, and those of an engine over its nodes."""
    cluster, engines = arguments.cluster, arguments.engines
    if engines.server_groups is not None:  # whose sizes count instead
        return
    if not engines.rollout_external and cluster.rollout_num_gpus % cluster.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {cluster.rollout_num_gpus} is not a multiple of "
            f"--rollout-num-gpus-per-engine {cluster.rollout_num_gpus_per_engine}"
        )
    if cluster.rollout_num_gpus_per_engine % cluster.rollout_num_nodes_per_engine:
        yield (
            f"--rollout-num-gpus-per-engine {cluster.rollout_num_gpus_per_engine} does not divide evenly over "
            f"--rollout-num-nodes-per-engine {cluster.rollout_num_nodes_per_engine}"
        )


def check_network(arguments: Arguments) -> Iterator[str]:
    """Check the form of ports and labels, and the flags that a cluster of several nodes needs."""
    cluster = arguments.cluster
    for read in (lambda: cluster.ports, lambda: cluster.actor_labels, lambda: cluster.rollout_labels):
        yield from refusal(read)
    labels = {"--actor-node-labels": cluster.actor_node_labels, "--rollout-node-labels": cluster.rollout_node_labels}
    for flag in given(labels) if cluster.ray_address is None else ():
        yield f"{flag} without --ray-address: this machine alone has no labels; name a cluster, or leave it out"
    if cluster.host is not None and ":" in cluster.host:
        yield f"--host {cluster.host}: expected an IPv4 address or a name: this run's servers speak no IPv6"
    certified = (cluster.tls_certificate is not None, cluster.tls_key is not None)
    if any(certified) != all(certified) or (cluster.tls_ca is not None and not any(certified)):
        yield "--tls-certificate and --tls-key need each other, and --tls-ca both: give them, or none of the three"
    weights = arguments.weights
    if cluster.ray_address and weights.weight_transport == "disk" and weights.weight_staging_dir is None:
        yield (
            "--weight-transport disk on a cluster: by default the files are in memory or in the temporary directory of "
            "the trainer's node; give --weight-staging-dir on a file system that trainer ranks and engines share, or "
            f"use {'object_store' if cluster.colocate else 'distributed or object_store'}"
        )


def check_colocation(arguments: Arguments) -> Iterator[str]:
    """Check that both sides can take turns on the trainer's GPUs."""
    cluster, engines, weights = arguments.cluster, arguments.engines, arguments.weights
    if not cluster.colocate:
        return
    nodes, transport = cluster.actor_num_nodes, weights.weight_transport
    reaches = "object_store, or disk with --weight-staging-dir"
    contradictions = {
        "without --on-policy, and trainer and engines would work at the same time": not arguments.staleness.on_policy,
        "with --device cpu, where sides share cores anyway: leave it out": cluster.device == "cpu",
        f"with one side alone ({arguments.debug.sides}): there is no other side to take turns with": (
            arguments.debug.sides != "both"
        ),
        "with --server-groups: all engines are alike": engines.server_groups is not None,
        "with --rollout-external: those engines have their own GPUs": bool(engines.rollout_external),
        "with --rollout-node-labels: engines are on the trainer's nodes, so use --actor-node-labels": bool(
            cluster.rollout_node_labels
        ),
        "with --weight-transport distributed, whose process group may have a GPU only once: use "
        f"{'ipc' if nodes == 1 else reaches}": transport == "distributed",
        f"with --weight-transport ipc and --actor-num-nodes {nodes}: engines on other nodes than the sending rank's "
        f"cannot open its GPU; use {reaches}": transport == "ipc" and nodes > 1,
        f"with --weight-delta {weights.weight_delta}: engines forget the version before": weights.weight_delta != "off",
        f"with --engine-max-restarts {engines.engine_max_restarts}: an engine would restart where the trainer is; use "
        "0 (--max-run-restarts restarts the run)": engines.engine_max_restarts > 0,
    }
    yield from (f"--colocate {problem}" for problem in (*given(contradictions), *_room_problems(cluster)))


def _room_problems(cluster: ClusterArguments) -> Iterator[str]:
    """Yield why the engines have no place on the GPUs that train: each has equally many on each of its nodes."""
    nodes, gpus, spread = cluster.actor_num_nodes, cluster.actor_num_gpus_per_node, cluster.rollout_num_nodes_per_engine
    size = cluster.rollout_num_gpus_per_engine
    here = f"{gpus} of each of {nodes} nodes train (--actor-num-gpus-per-node, --actor-num-nodes)"
    if cluster.rollout_num_gpus > cluster.trainer_world_size:
        yield (
            f"with --rollout-num-gpus {cluster.rollout_num_gpus}, and only {cluster.trainer_world_size} GPUs train "
            "(--actor-num-nodes, --actor-num-gpus-per-node)"
        )
    elif spread > nodes:
        yield f"with --rollout-num-nodes-per-engine {spread}, and only {nodes} train (--actor-num-nodes)"
    elif (share := ceil(size / spread)) > gpus:
        fitting = [count for count in range(spread, nodes + 1) if size % count == 0 and size // count <= gpus]
        wider = f"--rollout-num-nodes-per-engine {fitting[0]}, or " if fitting else ""
        yield f"with engines of {share} GPUs on a node, and {here}: use {wider}a smaller --rollout-num-gpus-per-engine"
    elif cluster.num_engines > (room := (nodes // spread) * (gpus // share)):
        divisor = (
            f"--rollout-num-nodes-per-engine that divides {nodes}"
            if nodes % spread
            else f"--rollout-num-gpus-per-engine that divides {gpus * spread}"
        )
        yield (
            f"with {cluster.num_engines} engines of {size} GPUs, and {here}: {room} fit; use --rollout-num-gpus "
            f"{room * size}, or a {divisor}"
        )


def check_ports(arguments: Arguments) -> Iterator[str]:
    """Check that the first node with trainer ranks has enough ports: the only node without a cluster, and one of
    several with engines with ``--colocate``.
    """
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
    elif cluster.colocate:
        share = max(1, cluster.rollout_num_gpus_per_engine // cluster.rollout_num_nodes_per_engine)
        here = min(cluster.num_engines, cluster.actor_num_gpus_per_node // share)
        taken |= {"engines": here * _ports_of_engine(groups[0].all_extra(arguments))}
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
        "engines": sum(
            group.engines * _ports_of_engine(group.all_extra(arguments)) for group in groups if not group.external
        ),
        "the session server": arguments.sessions.session_server_workers if arguments.sessions.runs_agent else 0,
    }
    return {purpose: count for purpose, count in taken.items() if count}


def _ports_of_engine(extra: Sequence[str]) -> int:
    """Its server's, and those by which its processes meet; on the first of its nodes."""
    return 9 if has_attention_groups(extra) else 2
