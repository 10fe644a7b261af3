"""Which nodes trainer ranks and engines go to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.engines.kind import EngineKind, ServerSpec
from miles_async.engines.placement import EnginePlace, RayServers, _EngineNodes
from miles_async.errors import EngineStartError, TrainerError
from miles_async.trainer.placement import Placement, RankResources

Options = dict[str, Any]  # that Ray was given
Asked = dict[str, Any]  # of the fake of Ray, by name

NODES = [
    {"Alive": True, "NodeID": "b" * 56, "NodeManagerAddress": "10.0.0.2", "Labels": {"pool": "x"}, "Resources": {}},
    {"Alive": False, "NodeID": "c" * 56, "NodeManagerAddress": "10.0.0.3", "Labels": {"pool": "x"}, "Resources": {}},
    {"Alive": True, "NodeID": "a" * 56, "NodeManagerAddress": "10.0.0.1", "Labels": {}, "Resources": {"CPU": 2.0}},
    {"Alive": True, "NodeID": "d" * 56, "NodeManagerAddress": "10.0.0.4", "Labels": {"pool": "x"}, "Resources": {}},
]


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: NODES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The last placement group that Ray was asked for; it grants it at once, its bundles on ``granted`` nodes."""
    asked: Asked = {"granted": ["d" * 56, "b" * 56]}

    class Group:
        def __init__(self, bundles: list[dict[str, float]], **options: object) -> None:
            asked.update(bundles=bundles, **options)

        def wait(self, timeout_seconds: float) -> bool:
            time.sleep(0.01)
            return bool(asked["granted"])

    monkeypatch.setattr("ray.util.placement_group", Group)
    monkeypatch.setattr(
        "ray.util.placement_group_table",
        lambda _: {"bundles_to_node_id": dict(enumerate(asked["granted"]))},
    )
    monkeypatch.setattr("ray.util.remove_placement_group", lambda _: asked.update(removed=True))
    monkeypatch.setattr(
        "ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: placement_group_bundle_index,
    )
    return asked


async def test_ranks_are_on_as_many_nodes_as_asked_consecutive_ones_together(asked: Asked) -> None:
    resources = RankResources(num_cpus=1, num_gpus=1, labels={"pool": "x"})
    placement = Placement(resources, 2, 4)
    await placement.reserve(5.0)
    assert asked["bundles"] == [{"CPU": 4, "GPU": 4}] * 2
    assert asked["strategy"] == "STRICT_SPREAD"
    assert asked["bundle_label_selector"] == [{"pool": "x"}] * 2
    # Bundle 1 is on the node with the lower address.
    assert [placement.options(rank)["scheduling_strategy"] for rank in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]


async def test_what_ray_cannot_place_is_said_with_what_there_is(asked: Asked) -> None:
    # covers: C10
    asked["granted"] = []
    placement = Placement(RankResources(num_cpus=1, num_gpus=8, labels={"pool": "x"}), 3, 1)
    with pytest.raises(TrainerError, match=r"3 nodes .*pool.*--actor-node-labels.*10\.0\.0\.1 \(2 CPU\); 10\."):
        await placement.reserve(0.05)


@pytest.mark.parametrize(
    ("labels", "expected"), [({}, ["a", "b", "d", "a"]), ({"pool": "x"}, ["b", "d", "b", "d"])], ids=["any", "labelled"]
)
async def test_engines_without_gpus_take_turns_on_the_nodes(
    monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], expected: list[str]
) -> None:
    started = await _started(monkeypatch, "cpu", labels)
    assert [options["scheduling_strategy"].node_id[0] for options in started] == expected


@pytest.mark.parametrize(
    ("chosen", "selector"),
    [("b", {"ray.io/node-id": "b" * 56}), ("c", {"pool": "x"}), (None, {"pool": "x"})],
    ids=["decided", "its node is gone", "one more"],
)
async def test_an_engine_gets_its_gpus_where_that_was_decided_or_where_ray_has_them(
    monkeypatch: pytest.MonkeyPatch, asked: Asked, chosen: str | None, selector: dict[str, str]
) -> None:
    asked["granted"] = ["b" * 56]
    places = [EnginePlace(node_ids=(chosen * 56,))] * 4 if chosen else []
    for options in await _started(monkeypatch, "cuda", {"pool": "x"}, places):
        assert options == {"num_cpus": 0, "num_gpus": 2, "scheduling_strategy": 0}
    assert asked["bundles"] == [{"GPU": 2}]
    assert asked["bundle_label_selector"] == [selector]


async def test_an_engine_on_the_trainers_gpus_reserves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [EnginePlace(node_ids=("b" * 56,), gpus=("3", "1"))] * 4
    for options in await _started(monkeypatch, "cuda", {}, places):
        assert options["num_gpus"] == 0
        assert options["scheduling_strategy"].node_id == "b" * 56


async def test_an_engine_without_gpus_to_be_had_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    # covers: C10
    asked["granted"] = []
    with pytest.raises(EngineStartError, match=r"with 2 free GPUs each within 0.05 s .*10\.0\.0\.1 \(2 CPU\)"):
        await _started(monkeypatch, "cuda", {}, start_timeout=0.05)
    assert asked["removed"]


async def test_engines_without_a_node_to_go_to_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineStartError, match=r"for engines, found 10\.0\.0\.1 \(2 CPU\); .*--rollout-node-labels"):
        await _started(monkeypatch, "cpu", {"pool": "y"})


async def test_engines_wait_for_nodes_that_were_there_and_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is restarted comes back in minutes; labels that no node ever had are a mistake."""
    monkeypatch.setattr("miles_async.engines.placement._POLL_SECONDS", 0.01)
    found: list[list[str]] = [[], ["10.0.0.1"], [], [], ["10.0.0.2"], *[[]] * 100]
    monkeypatch.setattr("miles_async.engines.placement.describe_nodes", lambda: "none")
    monkeypatch.setattr("miles_async.engines.placement.alive_nodes", lambda _: found.pop(0))
    nodes = _EngineNodes({"pool": "x"}, 0.2)
    with pytest.raises(EngineStartError, match="found none"):
        await nodes.choose(0, 1)
    assert len(found) == 104
    assert await nodes.choose(0, 1) == ["10.0.0.1"]
    assert await nodes.choose(0, 1) == ["10.0.0.2"]
    with pytest.raises(EngineStartError, match="found none"):
        await nodes.choose(0, 1)
    assert len(found) < 100


async def _started(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    labels: dict[str, str],
    places: Sequence[EnginePlace] = (),
    start_timeout: float = 600.0,
) -> list[Options]:
    """Options of the actors of four engines."""
    started: list[Options] = []

    def answer(*_: object) -> Awaitable[str]:
        async def url() -> str:
            return "http://10.0.0.1:1"

        return url()

    class ActorClass:
        def options(self, **options: object) -> ActorClass:
            started.append(options)
            return self

        def remote(self, *_: object) -> object:
            return SimpleNamespace(perform=SimpleNamespace(remote=answer))

    monkeypatch.setattr("ray.remote", lambda _: ActorClass())
    spec = ServerSpec(
        model_path="m", device=device, dtype="float32", tensor_parallel_size=2, start_timeout=start_timeout
    )
    kind = EngineKind(name="none", command=None, environment=None, is_up=None, calls=None)
    launch = RayServers(kind, spec, labels, places=places)
    for index in range(4):
        await launch(index, 0).start()
    return started
