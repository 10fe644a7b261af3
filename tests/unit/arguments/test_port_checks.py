"""A ``--port-range`` that is certainly too small is refused at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import (
    Arguments,
    DebugArguments,
    EnginesArguments,
    ModelArguments,
    SessionsArguments,
    WeightsArguments,
)
from miles_async.arguments.cluster_checks import check_ports

FLEET = """
[groups.small]
engines = 3
[groups.test]
role = "evaluation"
engines = 2
[groups.judge]
role = "frozen"
"""


def with_ports(count: int, cluster: dict[str, object] | None = None, **groups: object) -> Arguments:
    arguments = replace(Arguments(), **groups)
    found = replace(arguments.cluster, port_range=f"20000-{19999 + count}", **(cluster or {}))
    return replace(arguments, cluster=found)


def assert_needs(count: int, cluster: dict[str, object] | None = None, **groups: object) -> str:
    """That many ports are enough, and one less is refused; return the refusal."""
    assert list(check_ports(with_ports(count, cluster, **groups))) == []
    [problem] = check_ports(with_ports(count - 1, cluster, **groups))
    assert f"expected at least {count} ports" in problem
    assert problem.endswith(f"found {count - 1}: give a wider range")
    return problem


def test_the_refusal_says_what_takes_the_ports() -> None:
    # covers: C10
    parts = ("the rendezvous of ranks", "weights", "weights of engines under repair", "routers")
    refusal = assert_needs(8, {"rollout_num_gpus": 2})
    assert f"({', '.join(f'1 for {part}' for part in parts)}, 4 for engines)" in refusal


@pytest.mark.parametrize(
    ("transport", "order", "sets"),
    [("object_store", "all", 0), ("distributed", "all", 1 + 1), ("distributed", "rolling", 2 + 1)],
)
def test_every_sending_rank_takes_a_port_per_set_of_engines(transport: str, order: str, sets: int) -> None:
    # covers: C10
    weights = WeightsArguments(weight_transport=transport, publish_order=order, rolling_engines=3)
    model = ModelArguments(pipeline_model_parallel_size=4)
    rendezvous, router, engines, senders = 1, 1, 2 * 6, 4
    needed = rendezvous + router + engines + senders * sets
    assert_needs(needed, {"rollout_num_gpus": 6}, weights=weights, model=model)


def test_sending_ranks_are_spread_over_the_nodes_of_a_cluster() -> None:
    # covers: C10
    nodes = {"ray_address": "auto", "actor_num_nodes": 2}
    assert_needs(1 + 2 * 2, nodes, model=ModelArguments(pipeline_model_parallel_size=4))


def test_on_one_machine_everything_takes_its_ports_there(tmp_path: Path) -> None:
    # covers: C10
    (tmp_path / "fleet.toml").write_text(FLEET)
    fleet, agent = EnginesArguments(server_groups=tmp_path / "fleet.toml"), SessionsArguments(agent_command="agent")
    by_ranks, routers, engines, sessions = 1 + 2 + 1, 3, 2 * (3 + 2 + 1), 1
    assert_needs(by_ranks + routers + engines + sessions, engines=fleet, sessions=agent)
    assert_needs(by_ranks, {"ray_address": "auto"}, engines=fleet, sessions=agent)


@pytest.mark.parametrize("flags", [("--attn-dp-size", "2"), ("--enable-dp-attention", "--dp-size=2")])
def test_engines_with_attention_groups_take_nine_ports(flags: tuple[str, ...]) -> None:
    # covers: C10
    grouped = EnginesArguments(sglang_extra=flags)
    assert "18 for engines" in assert_needs(4 + 2 * 9, {"rollout_num_gpus": 2}, engines=grouped)


def test_a_node_of_a_cluster_has_engines_too_where_sides_take_turns() -> None:
    # covers: C10
    nodes = {"ray_address": "auto", "colocate": True, "actor_num_nodes": 2, "actor_num_gpus_per_node": 8}
    files = WeightsArguments(weight_transport="object_store")
    assert_needs(1 + 2 * 4, {**nodes, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 2}, weights=files)
    large = {"rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 16, "rollout_num_nodes_per_engine": 2}
    assert_needs(1 + 2 * 1, {**nodes, **large}, weights=files)


def test_nothing_is_refused_without_a_range_of_two_sides() -> None:
    assert list(check_ports(Arguments())) == []
    assert list(check_ports(with_ports(1, debug=DebugArguments(debug_rollout_only=True)))) == []
    assert list(check_ports(with_ports(1, engines=EnginesArguments(server_groups=Path("none.toml"))))) == []
