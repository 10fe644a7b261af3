"""``--colocate`` is refused where sides cannot take turns, naming what to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.arguments import (
    Arguments,
    ClusterArguments,
    EnginesArguments,
    StalenessArguments,
    WeightsArguments,
)
from miles_async.arguments.cluster_checks import check_colocation

# covers: C3

FINE = Arguments(
    cluster=ClusterArguments(colocate=True, actor_num_gpus_per_node=4, rollout_num_gpus=4),
    engines=EnginesArguments(engine_max_restarts=0),
    staleness=StalenessArguments(on_policy=True),
    weights=WeightsArguments(weight_transport="ipc"),
)


def test_engines_may_use_the_trainers_gpus() -> None:
    assert list(check_colocation(FINE)) == []
    assert list(check_colocation(Arguments())) == []


@pytest.mark.parametrize(
    ("group", "change", "named"),
    [
        ("staleness", {"on_policy": False}, "--on-policy"),
        ("cluster", {"device": "cpu"}, "--device cpu"),
        ("cluster", {"actor_num_nodes": 2}, "--actor-num-nodes 2"),
        ("cluster", {"rollout_num_nodes_per_engine": 2}, "--rollout-num-nodes-per-engine"),
        ("cluster", {"rollout_num_gpus": 5}, "--actor-num-gpus-per-node"),
        ("engines", {"server_groups": Path("x")}, "--server-groups"),
        ("engines", {"rollout_external": ("x:1",)}, "--rollout-external"),
        ("engines", {"engine_max_restarts": 1}, "--engine-max-restarts 1"),
        ("weights", {"weight_transport": "distributed"}, "use ipc"),
        ("weights", {"weight_delta": "xor"}, "--weight-delta xor"),
    ],
)
def test_what_contradicts_turns_is_refused(group: str, change: dict[str, object], named: str) -> None:
    arguments: Any = replace(FINE, **{group: replace(getattr(FINE, group), **change)})
    (problem,) = check_colocation(arguments)
    assert problem.startswith("--colocate ")
    assert named in problem
