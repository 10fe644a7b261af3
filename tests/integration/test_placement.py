"""Placement by real Ray on three nodes with four GPUs each, which are numbers only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from miles_async.arguments import Arguments, ClusterArguments
from miles_async.arguments.engines import EnginesArguments
from miles_async.engines.kind import EngineKind, ServerSpec
from miles_async.engines.placement import RayServers
from miles_async.engines.server_process import ServerProcess
from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster.nodes import free_gpus
from miles_async.runtime.cluster.reservation import Reservation
from miles_async.trainer.actor import TrainerActor
from miles_async.trainer.placement import Placement, RankResources
from miles_async.wiring.gpus import shared_places
from miles_async.wiring.placement import place_run

KIND = EngineKind(name="none", command=None, environment=None, is_up=None, calls=None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    for labels in ({}, {"pool": "x"}, {"pool": "x"}):
        add_node(cluster, labels)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def add_node(cluster: Cluster, labels: dict[str, str]) -> Any:
    return cluster.add_node(num_cpus=1, num_gpus=4, object_store_memory=1 << 27, labels=labels)


@pytest.fixture
def node_ids(cluster: Cluster) -> list[str]:
    """Ids of the nodes. The last two are labelled pool=x."""
    return [node.node_id for node in cluster.list_all_nodes()]


def arguments(**cluster: object) -> Arguments:
    return Arguments(
        cluster=ClusterArguments(ray_address="auto", **cluster), engines=EnginesArguments(engine_start_timeout=3.0)
    )


class Where:
    """An actor that answers everything with the id of its node: an engine's start with that instead of a URL."""

    def __init__(self, *_: object) -> None: ...

    def perform(self, *_: object) -> str:
        return str(ray.get_runtime_context().get_node_id())


async def test_ranks_and_engines_are_where_it_was_decided(node_ids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    placement = await place_run(
        arguments(
            actor_num_nodes=2,
            actor_num_gpus_per_node=4,
            rollout_num_gpus=4,
            rollout_num_gpus_per_engine=2,
            rollout_node_labels=("pool=x",),
        ),
        "cuda",
    )
    assert node_ids[0] in placement.trainer  # where no engine may be
    [engines_node] = {node for place in placement.engines["engine"] for node in place.node_ids}
    assert {*placement.trainer, engines_node} == {*node_ids}

    monkeypatch.setattr("miles_async.engines.placement.EngineActor", Where)
    spec = ServerSpec(model_path="m", device="cuda", dtype="float32", tensor_parallel_size=2)
    launch = RayServers(KIND, spec, {"pool": "x"}, places=placement.engines["engine"])
    servers = [launch(index, 0) for index in range(2)]
    assert [await server.start() for server in servers] == [engines_node] * 2  # before the trainer has its nodes

    ranks = Placement(RankResources(num_cpus=0, num_gpus=1), 2, 4, placement.trainer)
    await ranks.reserve(10.0)
    actors = [ray.remote(Where).options(**ranks.options(rank)).remote() for rank in range(8)]
    where = [await actor.perform.remote() for actor in actors]
    assert where[:4] == where[:1] * 4
    assert where[4:] == where[4:5] * 4
    assert {*where} == {*placement.trainer}

    await servers[0].stop()
    restarted = launch(0, 1)  # where it was
    assert await restarted.start() == engines_node
    for server in (restarted, servers[1]):
        await server.stop()
    ranks.release()


class OnGpu:
    """A rank that says which GPU it has and what it sees."""

    location = TrainerActor.location

    def visible(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.long
async def test_engines_that_share_gpus_see_those_of_their_ranks(
    node_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines start after ranks have all GPUs, and reserve none."""
    run = arguments(colocate=True, actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    resources = RankResources.for_device("cuda", {}, shares_gpu=True)
    ranks = Placement(replace(resources, num_cpus=0), 1, 4, (await place_run(run, "cuda")).trainer)
    await ranks.reserve(10.0)
    actors = [ray.remote(OnGpu).options(**ranks.options(rank)).remote() for rank in range(4)]
    locations = [await actor.location.remote() for actor in actors]
    gpus = [gpu for _, gpu in locations]
    assert sorted(gpus) == ["0", "1", "2", "3"]
    assert [await actor.visible.remote() for actor in actors] == gpus

    places = shared_places(run, locations)["engine"]
    assert [place.gpus for place in places] == [((gpus[0], gpus[1]),), ((gpus[2], gpus[3], gpus[0]),)]
    monkeypatch.setattr("miles_async.engines.placement.EngineActor", Where)
    spec = ServerSpec(model_path="m", device="cuda", dtype="float32", tensor_parallel_size=2)
    servers = [RayServers(KIND, spec, {}, places=places)(index, 0) for index in range(2)]
    assert [await server.start() for server in servers] == [node for node, _ in locations[:2]]
    for server in servers:
        await server.stop()
    ranks.release()


class OnNode:
    """An engine's actor that answers with its node, and the GPUs that its server would see."""

    def __init__(self, _: object, spec: ServerSpec, *__: object) -> None:
        self._gpus = spec.gpus

    async def perform(self, _: object, method: Any, *__: object) -> object:
        if method.__name__ == "wait_exit":
            await asyncio.Event().wait()
        return ray.get_runtime_context().get_node_id(), self._gpus


@pytest.mark.parametrize(("size", "spread"), [(2, 1), (4, 1), (4, 2), (8, 2)])
async def test_engines_on_the_gpus_of_ranks_of_two_nodes(
    node_ids: list[str], monkeypatch: pytest.MonkeyPatch, size: int, spread: int
) -> None:
    """Each part of an engine is on the node of the ranks whose GPUs it has."""
    run = arguments(
        colocate=True,
        actor_num_nodes=2,
        actor_num_gpus_per_node=4,
        rollout_num_gpus=8,
        rollout_num_gpus_per_engine=size,
        rollout_num_nodes_per_engine=spread,
    )
    ranks = Placement(RankResources(num_cpus=0, num_gpus=1), 2, 4, (await place_run(run, "cuda")).trainer)
    await ranks.reserve(10.0)
    actors = [ray.remote(OnGpu).options(**ranks.options(rank)).remote() for rank in range(8)]
    locations = [await actor.location.remote() for actor in actors]
    assert len({*locations}) == 8

    monkeypatch.setattr("miles_async.engines.placement.EngineActor", OnNode)
    spec = ServerSpec(model_path="m", device="cuda", dtype="float32", tensor_parallel_size=size, nodes=spread)
    launch = RayServers(KIND, spec, {}, places=shared_places(run, locations)["engine"])
    servers: list[Any] = [launch(index, 0) for index in range(8 // size)]
    for server in servers:
        await server.start()
    parts = [await part.perform(ServerProcess.pid) for server in servers for part in server._parts]
    assert {(node, gpu) for node, gpus in parts for gpu in gpus} == {*locations}
    assert [len(gpus) for _, gpus in parts] == [size // spread] * len(parts)
    assert sum(map(len, (gpus for _, gpus in parts))) == 8
    for server in servers:
        await server.stop()
    ranks.release()


async def test_what_there_is_no_room_for_is_said_with_what_there_is(node_ids: list[str]) -> None:
    # covers: C10
    whole_node = Reservation({"GPU": 3}, 1, {"pool": "x"})
    assert await whole_node.reserve(10.0)
    with pytest.raises(ConfigurationError, match=r"2 nodes with 4 GPUs each labelled pool=x .*pool=x\), 1 GPUs free"):
        await place_run(arguments(actor_num_nodes=2, actor_num_gpus_per_node=4, actor_node_labels=("pool=x",)), "cuda")
    whole_node.release()


async def test_gpus_that_become_free_are_waited_for(node_ids: list[str]) -> None:
    some = [Reservation({"GPU": 4}, 1, {}) for _ in node_ids]
    for each in some:
        assert await each.reserve(10.0)
    assert sum(free_gpus().values()) == 0
    wanted = arguments(actor_num_gpus_per_node=1, rollout_num_gpus=1)
    wanted = replace(wanted, engines=EnginesArguments(engine_start_timeout=30.0))
    for each in some:
        each.release()
    assert (await place_run(wanted, "cuda")).trainer


async def test_a_node_that_dies_while_it_is_waited_for_is_not_waited_for(cluster: Cluster) -> None:
    # covers: C10
    dying = add_node(cluster, {})
    in_use = Reservation({"GPU": 4}, 1, {}, [dying.node_id])
    assert await in_use.reserve(10.0)
    waiting = Reservation({"GPU": 4}, 1, {}, [dying.node_id])
    reserved = asyncio.ensure_future(waiting.reserve(40.0))
    await asyncio.sleep(2.0)
    assert not reserved.done()
    await asyncio.to_thread(cluster.remove_node, dying)
    assert await reserved
    for each in (in_use, waiting):
        each.release()
