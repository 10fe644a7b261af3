"""Flags that ``--colocate`` agrees with."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments


def check_colocation(arguments: Arguments) -> Iterator[str]:
    """Check that both sides can take turns on the trainer's GPUs."""
    cluster, engines, weights = arguments.cluster, arguments.engines, arguments.weights
    if not cluster.colocate:
        return
    contradictions = {
        "without --on-policy, and trainer and engines would work at the same time": not arguments.staleness.on_policy,
        "with --device cpu, where sides share cores anyway: leave it out": cluster.device == "cpu",
        f"with --actor-num-nodes {cluster.actor_num_nodes}: weights reach engines of one node only": (
            cluster.actor_num_nodes > 1
        ),
        "with --rollout-num-nodes-per-engine: all GPUs are on one node": cluster.rollout_num_nodes_per_engine > 1,
        f"with --rollout-num-gpus {cluster.rollout_num_gpus}, and only {cluster.trainer_world_size} GPUs train "
        "(--actor-num-gpus-per-node)": cluster.rollout_num_gpus > cluster.trainer_world_size,
        f"with one side alone ({arguments.debug.sides}): there is nobody to take turns with": (
            arguments.debug.sides != "both"
        ),
        "with --server-groups: all engines are alike": engines.server_groups is not None,
        "with --rollout-external: those engines have their own GPUs": bool(engines.rollout_external),
        "with --weight-transport distributed, whose process group may have a GPU only once: use ipc": (
            weights.weight_transport == "distributed"
        ),
        f"with --weight-delta {weights.weight_delta}: engines forget the version before": weights.weight_delta != "off",
        f"with --engine-max-restarts {engines.engine_max_restarts}: an engine would restart where the trainer is; use "
        "0 (--max-run-restarts restarts the run)": engines.engine_max_restarts > 0,
    }
    for problem, holds in contradictions.items():
        if holds:
            yield f"--colocate {problem}"
