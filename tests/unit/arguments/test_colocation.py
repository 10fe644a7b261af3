"""``--colocate`` is refused where sides cannot take turns, naming what to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.cluster_checks import check_colocation, check_network
from miles_async.arguments.parser import assemble

# covers: C3

GPUS = {"colocate": True, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 4}
FINE = {**GPUS, "on_policy": True, "engine_max_restarts": 0, "weight_transport": "ipc"}


def problems(**changes: object) -> list[str]:
    """Problems of a run whose flags differ from ``FINE`` in these fields."""
    return list(check_colocation(assemble(FINE | changes, {})))


def on_nodes(transport: str, **changes: object) -> list[str]:
    """Problems of a run on two nodes of 4 GPUs."""
    return problems(**{"actor_num_nodes": 2, "rollout_num_gpus": 8, "weight_transport": transport} | changes)


def test_engines_may_use_the_trainers_gpus() -> None:
    assert problems() == []
    assert list(check_colocation(Arguments())) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"on_policy": False}, "--on-policy"),
        ({"device": "cpu"}, "--device cpu"),
        ({"actor_num_nodes": 2}, "ipc and --actor-num-nodes 2: engines on other nodes"),
        ({"rollout_num_nodes_per_engine": 2}, "--rollout-num-nodes-per-engine 2, and only 1 train"),
        ({"rollout_num_gpus": 5}, "--actor-num-gpus-per-node"),
        ({"server_groups": Path("x")}, "--server-groups"),
        ({"rollout_external": ("x:1",)}, "--rollout-external"),
        ({"rollout_node_labels": ("pool=b",)}, "use --actor-node-labels"),
        ({"engine_max_restarts": 1}, "--engine-max-restarts 1"),
        ({"weight_transport": "distributed"}, "use ipc"),
        ({"weight_delta": "xor"}, "--weight-delta xor"),
    ],
)
def test_what_contradicts_turns_is_refused(change: dict[str, object], named: str) -> None:
    (problem,) = problems(**change)
    assert problem.startswith("--colocate ")
    assert named in problem


def test_files_without_a_shared_directory_have_an_alternative_that_is_not_refused_in_turn() -> None:
    (problem,) = check_network(assemble(FINE | {"ray_address": "auto", "weight_transport": "disk"}, {}))
    assert problem.endswith("or use object_store")


def test_engines_may_use_the_gpus_of_several_nodes() -> None:
    assert on_nodes("object_store", rollout_num_gpus_per_engine=2) == []
    assert on_nodes("disk", rollout_num_gpus_per_engine=2) == []
    assert on_nodes("object_store", rollout_num_gpus_per_engine=8, rollout_num_nodes_per_engine=2) == []
    assert on_nodes("object_store", rollout_num_gpus=6, rollout_num_gpus_per_engine=3) == []  # one GPU of each is left


@pytest.mark.parametrize("transport", ["ipc", "distributed"])
def test_transports_that_reach_one_node_or_take_gpus_twice_are_refused(transport: str) -> None:
    (problem,) = on_nodes(transport)
    assert f"--weight-transport {transport}" in problem
    assert problem.endswith("use object_store, or disk with --weight-staging-dir")


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (
            {"rollout_num_gpus": 7, "rollout_num_gpus_per_engine": 7},
            "train .*: use a smaller --rollout-num-gpus-per-engine",
        ),
        ({"rollout_num_gpus_per_engine": 8}, "engines of 8 GPUs on a node, .* use --rollout-num-nodes-per-engine 2"),
        (
            {"actor_num_gpus_per_node": 6, "rollout_num_gpus": 12, "rollout_num_gpus_per_engine": 4},
            "3 engines of 4 GPUs, and 6 of each of 2 nodes train .*: 2 fit; use --rollout-num-gpus 8, or a "
            "--rollout-num-gpus-per-engine that divides 6",
        ),
        (
            {
                "actor_num_nodes": 3,
                "rollout_num_gpus": 12,
                "rollout_num_gpus_per_engine": 4,
                "rollout_num_nodes_per_engine": 2,
            },
            "use --rollout-num-gpus 8, or a --rollout-num-nodes-per-engine that divides 3",
        ),
        ({"rollout_num_gpus": 9}, "--rollout-num-gpus 9, and only 8 GPUs train"),
    ],
)
def test_engines_that_would_straddle_nodes_are_refused(layout: dict[str, object], named: str) -> None:
    (problem,) = on_nodes("object_store", **layout)
    assert re.search(named, problem)
