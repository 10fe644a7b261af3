"""Which nodes' GPUs train and generate."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from miles_async.runtime.cluster.nodes import GpuNeed, Node, NodeChoice, choose_nodes


def cluster(*free: int, labels: dict[int, dict[str, str]] | None = None) -> tuple[list[Node], dict[str, int]]:
    """Nodes n0, n1, ... and their free GPUs."""
    nodes = [
        Node(node_id=f"n{i}", address=f"10.0.0.{i}", labels=(labels or {}).get(i, {}), resources={"GPU": 8})
        for i in range(len(free))
    ]
    return nodes, {f"n{i}": amount for i, amount in enumerate(free)}


def one(gpus: int, nodes: int = 1, **labels: str) -> GpuNeed:
    return GpuNeed(gpus=gpus, nodes=nodes, labels=labels)


def test_engines_take_no_node_that_the_trainer_needs_whole() -> None:
    """Ray by itself would put some of the engines on either node."""
    choice = choose_nodes(*cluster(8, 8), one(8), [one(1)] * 8)
    assert choice == NodeChoice(trainer=("n0",), engines=(("n1",),) * 8)


def test_both_sides_share_a_node_only_if_they_must() -> None:
    apart = choose_nodes(*cluster(8, 8), one(4), [one(4)])
    assert apart == NodeChoice(trainer=("n0",), engines=(("n1",),))
    shared = choose_nodes(*cluster(8), one(4), [one(4)])
    assert shared == NodeChoice(trainer=("n0",), engines=(("n0",),))


def test_small_parts_fill_the_gaps_that_others_left() -> None:
    choice = choose_nodes(*cluster(8, 3, 4, 8), one(4), [one(2), one(8), one(8), one(1)])
    assert choice == NodeChoice(trainer=("n2",), engines=(("n1",), ("n0",), ("n3",), ("n1",)))


def test_the_trainer_leaves_the_gaps_to_engines_that_need_them() -> None:
    """It would fit n1 best, where only the engines may be."""
    labels = {1: {"pool": "x"}}
    choice = choose_nodes(*cluster(8, 4, labels=labels), one(4), [one(4, pool="x")])
    assert choice == NodeChoice(trainer=("n0",), engines=(("n1",),))


def test_nodes_are_in_the_order_of_their_addresses() -> None:
    nodes, free = cluster(8, 8, 8)
    choice = choose_nodes(nodes[::-1], free, one(8, nodes=3), [])
    assert choice.trainer == ("n0", "n1", "n2")


def test_gpus_of_several_nodes_make_no_place_for_a_tensor_parallel_group() -> None:
    assert choose_nodes(*cluster(4, 4), one(1), [one(6)]) is None
    assert choose_nodes(*cluster(8), one(1, nodes=2), []) is None


needs = st.builds(GpuNeed, gpus=st.integers(1, 8), nodes=st.integers(1, 2), labels=st.sampled_from([{}, {"pool": "x"}]))


@given(
    free=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    labelled=st.sets(st.integers(0, 4)),
    trainer=needs,
    engines=st.lists(needs, max_size=4),
)
def test_every_choice_can_be_had(free: list[int], labelled: set[int], trainer: GpuNeed, engines: list[GpuNeed]) -> None:
    nodes, left = cluster(*free, labels={index: {"pool": "x"} for index in labelled})
    choice = choose_nodes(nodes, left, trainer, engines)
    if choice is None:
        return
    by_id = {node.node_id: node for node in nodes}
    for need, place in zip([trainer, *engines], [choice.trainer, *choice.engines], strict=True):
        assert len(set(place)) == need.nodes
        for node in place:
            assert need.labels.items() <= by_id[node].labels.items()
            left[node] -= need.gpus
    assert min(left.values()) >= 0


@given(free=st.lists(st.integers(0, 8), min_size=1, max_size=4), gpus=st.integers(1, 8), nodes=st.integers(1, 3))
def test_equal_engines_beside_a_trainer_find_a_place_apart_if_there_is_one(
    free: list[int], gpus: int, nodes: int
) -> None:
    """Compared with all ways to place the trainer."""
    trainer, engines = one(gpus, nodes=nodes), [one(1)] * 3
    fitting = [i for i, amount in enumerate(free) if amount >= gpus]
    possible = any(sum(free) - sum(free[i] for i in some) >= 3 for some in combinations(fitting, nodes))
    choice = choose_nodes(*cluster(*free), trainer, engines)
    if possible:
        assert not {*choice.trainer} & {node for place in choice.engines for node in place}
