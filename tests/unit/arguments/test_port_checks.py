"""A ``--port-range`` that is certainly too small is refused at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.cluster_checks import check_ports
from miles_async.arguments.parser import assemble

FLEET = """
[groups.small]
engines = 3
[groups.test]
role = "evaluation"
engines = 2
[groups.judge]
role = "frozen"
"""


def problems(ports: int, sglang_extra: tuple[str, ...] = (), **flags: object) -> list[str]:
    arguments = assemble({"port_range": f"20000-{19999 + ports}", **flags}, {})
    return list(check_ports(replace(arguments, engines=replace(arguments.engines, sglang_extra=sglang_extra))))


def assert_needs(count: int, **flags: object) -> str:
    """That many ports are enough, and one less is refused; return the refusal."""
    assert problems(count, **flags) == []
    [problem] = problems(count - 1, **flags)
    assert f"expected at least {count} ports" in problem
    assert problem.endswith(f"found {count - 1}: give a wider range")
    return problem


def test_the_refusal_says_what_takes_the_ports() -> None:
    # covers: C10
    parts = ("the rendezvous of ranks", "weights", "weights of engines under repair", "routers")
    refusal = assert_needs(8, rollout_num_gpus=2)
    assert f"({', '.join(f'1 for {part}' for part in parts)}, 4 for engines)" in refusal


@pytest.mark.parametrize(
    ("transport", "order", "sets"),
    [("object_store", "all", 0), ("distributed", "all", 1 + 1), ("distributed", "rolling", 2 + 1)],
)
def test_every_sending_rank_takes_a_port_per_set_of_engines(transport: str, order: str, sets: int) -> None:
    # covers: C10
    weights = {"weight_transport": transport, "publish_order": order, "rolling_engines": 3}
    rendezvous, router, engines, senders = 1, 1, 2 * 6, 4
    needed = rendezvous + router + engines + senders * sets
    assert_needs(needed, rollout_num_gpus=6, pipeline_model_parallel_size=4, **weights)


def test_sending_ranks_are_spread_over_the_nodes_of_a_cluster() -> None:
    # covers: C10
    assert_needs(1 + 2 * 2, ray_address="auto", actor_num_nodes=2, pipeline_model_parallel_size=4)


def test_on_one_machine_everything_takes_its_ports_there(tmp_path: Path) -> None:
    # covers: C10
    (tmp_path / "fleet.toml").write_text(FLEET)
    flags = {"server_groups": tmp_path / "fleet.toml", "agent_command": "agent"}
    by_ranks, routers, engines, sessions = 1 + 2 + 1, 3, 2 * (3 + 2 + 1), 1
    assert_needs(by_ranks + routers + engines + sessions, **flags)
    assert_needs(by_ranks, ray_address="auto", **flags)


@pytest.mark.parametrize("flags", [("--attn-dp-size", "2"), ("--enable-dp-attention", "--dp-size=2")])
def test_engines_with_attention_groups_take_nine_ports(flags: tuple[str, ...]) -> None:
    # covers: C10
    assert "18 for engines" in assert_needs(4 + 2 * 9, rollout_num_gpus=2, sglang_extra=flags)


def test_a_node_of_a_cluster_has_engines_too_where_sides_take_turns() -> None:
    # covers: C10
    nodes = {"ray_address": "auto", "colocate": True, "actor_num_nodes": 2, "actor_num_gpus_per_node": 8}
    turns = {**nodes, "rollout_num_gpus": 16, "weight_transport": "object_store"}
    assert_needs(1 + 2 * 4, rollout_num_gpus_per_engine=2, **turns)
    assert_needs(1 + 2 * 1, rollout_num_gpus_per_engine=16, rollout_num_nodes_per_engine=2, **turns)


def test_nothing_is_refused_without_a_range_of_two_sides() -> None:
    assert list(check_ports(Arguments())) == []
    assert problems(1, debug_rollout_only=True) == []
    assert problems(1, server_groups=Path("none.toml")) == []
