"""Copies of staged weights on engines' hosts: whole or by what changed, always exactly what was staged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from miles_async.arguments import WeightsArguments
from miles_async.errors import EngineError
from miles_async.seams import arguments_of
from miles_async.types import CanaryScore, Incarnation, StagedWeights
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports import host_files
from miles_async.weights.transports.object_store import PutsFiles
from miles_async.weights.transports.object_store_rank import ObjectStoreSender
from tests.fakes.fake_sides import CANARY, CANARY_LOGPROBS, FakeFleet, FakeTrainer, InProcess, Results, publish
from tests.fakes.publishers import publisher_of

FROZEN = "embed"  # a bucket of its own, which training leaves alone


class FileTrainer(FakeTrainer):
    """Weights of a few tensors that change a little with every version, really staged."""

    def __init__(self, events: list[str], sender: ObjectStoreSender) -> None:
        super().__init__(events)
        self._sender = sender
        self.sent_bytes: dict[str, int] = {}  # by file

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        shapes = {FROZEN: (100, 8), "a": (40, 8), "b": (40, 8), "c": (100, 8)}
        tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        tensors["a"][:version] += 1
        tensors["c"][7] -= version
        return tensors

    async def copy_weights(self, version: int) -> None:
        self._sender.copy(version, self.weights(version).items())

    async def stage_weights(self, version: int) -> StagedWeights:
        staged = self._sender.stage(version)
        return msgspec.structs.replace(staged, canary_tokens=CANARY, canary_logprobs=CANARY_LOGPROBS)

    def sender(self, index: int, *, repair: bool = False) -> InProcess:
        return Counting(self._sender, self.sent_bytes)


class Counting(InProcess):
    """Notes the size of what is put into the object store."""

    def __init__(self, half: object, sent_bytes: dict[str, int]) -> None:
        super().__init__(half)
        self._sent_bytes = sent_bytes

    async def call(self, method: Callable[..., object], *arguments: object) -> Any:
        answer = await super().call(method, *arguments)
        if method is PutsFiles.put_file:
            self._sent_bytes[arguments[1]] = answer[0].nbytes
        return answer


class FileFleet(FakeFleet):
    """Its engines have a host directory each, and hold the tensors of the files that they were told to load."""

    def __init__(self, directory: Path, engines: Sequence[str], *, one_node: bool = False) -> None:
        super().__init__([], joining=engines)
        self.hosts = {engine: directory / ("node" if one_node else f"of {engine}") / engine for engine in engines}
        self.inodes: dict[str, list[int]] = {}  # of the files that were loaded last
        self.tensors: dict[str, dict[str, torch.Tensor]] = {engine: {} for engine in engines}
        self.loaded: dict[str, list[str]] = {}
        for host in self.hosts.values():
            host.mkdir(parents=True)

    def restart(self, engine: str) -> None:
        """With an empty host directory, as any start of an engine."""
        self.hosts[engine] = self.hosts[engine].with_name(f"{engine} again {self.restarts[engine]}")
        self.hosts[engine].mkdir()
        self.tensors[engine].clear()
        super().restart(engine)

    async def on_host(
        self, engines: Sequence[Incarnation], function: Callable[..., object], *arguments: object, room: int = 0
    ) -> Results:
        results: dict[Incarnation, object] = {}
        for engine in engines:
            try:
                results[engine] = self._error("host", engine) or function(self.hosts[engine.engine], *arguments)
            except EngineError as error:
                results[engine] = error
        return results

    async def load_files(self, engines: Sequence[Incarnation], directories: object, version: int) -> Results:
        for engine in engines:
            if self._error("load", engine):
                continue
            files = in_directory(*arguments_of(engine, [directories]))
            self.loaded[engine.engine] = [file.name for file in files]
            self.inodes[engine.engine] = [file.stat().st_ino for file in files]
            for file in files:
                self.tensors[engine.engine] |= load_file(file)
        return await super().load_files(engines, directories, version)


def in_directory(directory: str) -> list[Path]:
    return sorted(Path(directory).glob("*.safetensors"))


class Setup:
    def __init__(self, directory: Path, engines: int = 1, *, one_node: bool = False, **flags: object) -> None:
        arguments = WeightsArguments(verify_weights="canary", **flags)
        delta = None if arguments.weight_delta == "off" else arguments.weight_delta
        options = StagingOptions(parent=directory / "staged", bucket_bytes=3200, delta=delta)  # type: ignore[arg-type]
        self.sender = ObjectStoreSender(options, put=np.array)
        self.fleet = FileFleet(directory, [f"engine-{index}" for index in range(engines)], one_node=one_node)
        self.trainer = FileTrainer(self.fleet.events, self.sender)
        self.publisher = publisher_of(self.trainer, self.fleet, arguments)

    async def publish(self, version: int) -> float:
        """The fraction sent; every serving engine holds exactly what was exported."""
        self.trainer.sent_bytes.clear()
        publication = await publish(self.publisher, version)
        self.check(version)
        return publication.sent_fraction

    def check(self, version: int) -> None:
        assert self.fleet.serving
        for engine in self.fleet.serving:
            found, expected = self.fleet.tensors[engine], self.trainer.weights(version)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), engine


Make = Callable[..., Setup]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a Setup, which is closed at the end of the test."""
    made: list[Setup] = []

    def one(**options: Any) -> Setup:
        made.append(Setup(tmp_path, **options))
        return made[-1]

    yield one
    for setup in made:
        setup.sender.close()


@pytest.fixture(params=["disk", "object_store"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["xor", "overwrite"])
def delta(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no Ray: an object is a reference to itself."""
    monkeypatch.setattr(ray, "put", np.array)


BUCKETS = [f"bucket-0000{index}.safetensors" for index in range(3)]


async def test_copies_are_gone_once_loaded(make: Make) -> None:
    setup = make(engines=2, weight_transport="object_store")
    for version in range(3):
        assert await setup.publish(version) == 1
        assert sorted(setup.trainer.sent_bytes) == BUCKETS
    assert [list(host.iterdir()) for host in setup.fleet.hosts.values()] == [[], []]


async def test_engines_that_have_the_previous_version_get_the_changes(make: Make, transport: str, delta: str) -> None:
    setup = make(engines=2, weight_transport=transport, weight_delta=delta)
    assert await setup.publish(0) == 1
    for version in (1, 2, 3):
        fraction = await setup.publish(version)
        assert 0 < fraction < 0.5
        assert setup.fleet.loaded["engine-0"] == BUCKETS[1:], FROZEN
        if transport == "object_store":
            assert sum(setup.trainer.sent_bytes.values()) == pytest.approx(fraction * 8960)
    assert [path.name for path in setup.fleet.hosts["engine-0"].iterdir()] == ["v0000003"]


async def test_an_engine_that_restarted_gets_everything_and_the_others_get_changes(make: Make, transport: str) -> None:
    setup = make(engines=2, weight_transport=transport, weight_delta="xor")
    await setup.publish(0)
    await setup.publish(1)
    setup.fleet.restart("engine-1")
    assert await setup.publisher.repair() == ("engine-1",)
    setup.check(1)
    assert len(setup.fleet.loaded["engine-1"]) == 3
    assert await setup.publish(2) < 0.5
    setup.fleet.restart("engine-0")
    assert 0.5 < await setup.publish(3) < 0.75


async def test_an_engine_that_restarts_after_its_host_got_changes_is_not_given_changes_alone(make: Make) -> None:
    # covers: C8
    setup = make(engines=2, weight_transport="disk", weight_delta="xor")
    await setup.publish(0)
    plain = setup.fleet.pause

    async def restart_meanwhile(engines: Sequence[Incarnation], mode: str) -> Any:
        setup.fleet.restart("engine-0")
        return await plain(engines, mode)

    setup.fleet.pause = restart_meanwhile  # type: ignore[method-assign]
    publication = await publish(setup.publisher, 1)
    setup.fleet.pause = plain  # type: ignore[method-assign]
    assert (publication.engines, publication.fenced) == (("engine-1",), ("engine-0",))
    assert not setup.fleet.tensors["engine-0"]
    assert setup.fleet.fenced == [], "the new start has done nothing wrong"
    assert await setup.publisher.repair() == ("engine-0",)
    setup.check(1)


async def test_a_version_that_was_skipped_is_sent_whole(make: Make) -> None:
    setup = make(weight_transport="disk", weight_delta="xor")
    await setup.publish(0)
    await setup.publish(1)
    assert await setup.publish(5) == 1
    assert await setup.publish(6) < 0.5


@pytest.mark.parametrize("why", ["its server missed a publication", "its host lost the files", "other tensors"])
async def test_an_engine_that_can_make_nothing_of_changes_gets_everything(make: Make, why: str) -> None:
    setup = make(weight_transport="disk", weight_delta="xor")
    await setup.publish(0)
    if why == "its server missed a publication":  # for which its host was made ready
        setup.fleet.versions["engine-0"] = -1
    elif why == "its host lost the files":
        host_files.discard(setup.fleet.hosts["engine-0"])
    else:
        weights = setup.trainer.weights(1) | {"c": torch.ones(50, 8)}
        setup.trainer.weights = lambda version: weights  # type: ignore[method-assign]
    assert await setup.publish(1) == 1


async def test_weights_that_did_not_change_are_a_version_too(make: Make) -> None:
    setup = make(weight_transport="disk", weight_delta="xor")
    setup.trainer.weights = lambda version: FileTrainer.weights(setup.trainer, 0)  # type: ignore[method-assign]
    await setup.publish(0)
    assert await setup.publish(1) == 0
    assert setup.fleet.versions == {"engine-0": 1}


async def test_a_base_that_was_changed_costs_that_engine(make: Make, delta: str) -> None:
    # covers: C8
    setup = make(engines=2, weight_transport="disk", weight_delta=delta)
    await setup.publish(0)
    _spoil_base(setup.fleet.hosts["engine-1"])
    publication = await publish(setup.publisher, 1)
    assert (publication.engines, publication.fenced) == (("engine-0",), ("engine-1",))
    assert "made from version 0 and what changed: expected digest" in setup.publisher._engines.last_loss
    setup.check(1)


# ----------------------------------------------------------------------------------- engines of one node
async def test_engines_of_a_node_share_one_copy(make: Make) -> None:
    setup = make(engines=4, one_node=True, weight_transport="object_store")
    for version in range(2):
        assert await setup.publish(version) == 0.25
        assert len(set(map(tuple, setup.fleet.inodes.values()))) == 1
        assert setup.fleet.loaded == dict.fromkeys(setup.fleet.hosts, BUCKETS)
    assert [list(host.iterdir()) for host in setup.fleet.hosts.values()] == [[]] * 4


async def test_changes_are_applied_once_per_node(make: Make, transport: str) -> None:
    setup = make(engines=2, one_node=True, weight_transport=transport, weight_delta="xor")
    assert await setup.publish(0) == 0.5
    for version in (1, 2):
        assert 0 < await setup.publish(version) < 0.25
        assert setup.fleet.loaded == dict.fromkeys(setup.fleet.hosts, BUCKETS[1:]), FROZEN
        assert len(set(map(tuple, setup.fleet.inodes.values()))) == 1


@pytest.mark.parametrize("how", ["restarted", "missed it"])
async def test_an_engine_without_the_version_before_gets_all_files_from_its_neighbour(make: Make, how: str) -> None:
    setup = make(engines=2, one_node=True, weight_transport="object_store", weight_delta="xor")
    await setup.publish(0)
    if how == "restarted":
        setup.fleet.restart("engine-0")
    else:
        setup.fleet.versions["engine-0"] = -1
    assert 0 < await setup.publish(1) < 0.25, "the trainer sent changes only"
    assert setup.fleet.loaded == {"engine-0": BUCKETS, "engine-1": BUCKETS[1:]}
    assert sorted(setup.fleet.serving) == ["engine-0", "engine-1"]


@pytest.mark.parametrize("delta", ["off", "xor"])
async def test_an_engine_that_is_lost_before_its_neighbours_have_its_files_costs_itself(make: Make, delta: str) -> None:
    # covers: C8
    setup = make(engines=3, one_node=True, weight_transport="object_store", weight_delta=delta)
    await setup.publish(0)
    on_host = setup.fleet.on_host

    async def lose_it(engines: Sequence[Incarnation], function: object, *arguments: object, room: int = 0) -> object:
        if function is host_files.link_version:
            setup.fleet.on_host = on_host  # type: ignore[method-assign]
            shutil.rmtree(setup.fleet.hosts["engine-0"])
            setup.fleet.restart("engine-0")
        return await on_host(engines, function, *arguments, room=room)

    setup.fleet.on_host = lose_it  # type: ignore[method-assign]
    publication = await publish(setup.publisher, 1)
    assert (publication.engines, publication.fenced) == (("engine-1", "engine-2"), ("engine-0",))
    setup.check(1)
    assert setup.fleet.inodes["engine-1"] == setup.fleet.inodes["engine-2"]
    assert await setup.publisher.repair() == ("engine-0",)
    setup.check(1)


async def test_a_base_that_was_changed_costs_the_engine_that_notices_and_its_neighbours_get_everything(
    make: Make, delta: str
) -> None:
    # covers: C8
    setup = make(engines=3, one_node=True, weight_transport="disk", weight_delta=delta)
    await setup.publish(0)
    _spoil_base(setup.fleet.hosts["engine-1"])
    publication = await publish(setup.publisher, 1)
    assert (publication.engines, publication.fenced) == (("engine-1", "engine-2"), ("engine-0",))
    setup.check(1)
    assert setup.fleet.loaded["engine-2"] == BUCKETS


# -------------------------------------------------------------------------- from engines that serve the version
async def test_an_engine_that_restarted_links_the_files_that_its_node_has(make: Make, transport: str) -> None:
    # covers: C8
    setup = make(engines=2, one_node=True, weight_transport=transport, weight_delta="xor")
    await setup.publish(0)
    await setup.publish(1)
    setup.fleet.restart("engine-1")
    setup.trainer.sent_bytes.clear()
    staged = setup.sender.file(1, "")
    staged.rename(staged.with_name("gone"))
    assert await setup.publisher.repair() == ("engine-1",)
    assert setup.trainer.sent_bytes == {}
    setup.check(1)
    staged.with_name("gone").rename(staged)
    assert await setup.publish(2) < 0.25


@pytest.mark.parametrize("fails_at", [None, "bucket-00001.safetensors"])
async def test_an_engine_on_another_node_passes_files_on_and_the_trainer_sends_the_rest_if_it_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch, fails_at: str | None
) -> None:
    # covers: C8
    def put(data: Any) -> object:
        if Path(data.filename).name == fails_at:
            raise EngineError("its store is full")
        return np.array(data)

    monkeypatch.setattr(ray, "put", put)
    setup = make(engines=2, weight_transport="object_store", weight_delta="xor")
    await setup.publish(0)
    await setup.publish(1)
    setup.fleet.restart("engine-1")
    setup.trainer.sent_bytes.clear()
    assert await setup.publisher.repair() == ("engine-1",)
    assert sorted(setup.trainer.sent_bytes) == (BUCKETS[1:] if fails_at else [])
    setup.check(1)
    assert setup.fleet.fenced == []


@pytest.mark.parametrize("holders_that_fail", [1, 2])
async def test_when_one_engine_fails_to_pass_files_on_the_next_one_does(
    make: Make, monkeypatch: pytest.MonkeyPatch, holders_that_fail: int
) -> None:
    """From the bucket on at which it failed; the trainer sends what no engine passes on."""
    # covers: C8
    setup = make(engines=3, weight_transport="object_store", weight_delta="xor")
    failing = [f"engine-{index}" for index in range(holders_that_fail)]
    passed: list[tuple[str, str]] = []

    def put(data: Any) -> object:
        [engine] = [name for name, host in setup.fleet.hosts.items() if host in Path(data.filename).parents]
        if engine in failing and Path(data.filename).name != BUCKETS[0]:
            raise EngineError("its store is full")
        passed.append((engine, Path(data.filename).name))
        return np.array(data)

    monkeypatch.setattr(ray, "put", put)
    await setup.publish(0)
    await setup.publish(1)
    setup.fleet.restart("engine-2")
    setup.trainer.sent_bytes.clear()
    assert await setup.publisher.repair() == ("engine-2",)
    rest = [("engine-1", bucket) for bucket in BUCKETS[1:]]
    assert passed == [("engine-0", BUCKETS[0]), *(rest if holders_that_fail == 1 else [])]
    assert sorted(setup.trainer.sent_bytes) == ([] if holders_that_fail == 1 else BUCKETS[1:])
    setup.check(1)
    assert setup.fleet.fenced == []


@pytest.mark.parametrize("one_node", [True, False])
async def test_an_engine_that_got_wrong_files_from_another_gets_them_from_the_trainer(
    make: Make, one_node: bool
) -> None:
    # covers: C8
    setup = make(engines=2, one_node=one_node, weight_transport="object_store", weight_delta="xor")
    await setup.publish(0)
    _spoil_base(setup.fleet.hosts["engine-0"])
    right = setup.trainer.weights(0)["a"]
    setup.fleet.restart("engine-1")

    async def scores(engines: Sequence[Incarnation], tokens: object) -> Results:
        differs = {each.engine: not torch.equal(setup.fleet.tensors[each.engine]["a"], right) for each in engines}
        found = {True: np.float32([9.0, 9.0]), False: np.float32(CANARY_LOGPROBS)}
        return {each: CanaryScore("0", found[differs[each.engine]]) for each in engines}

    setup.fleet.score = scores  # type: ignore[method-assign]
    assert await setup.publisher.repair() == ()
    assert setup.fleet.fenced == ["engine-1"]
    setup.fleet.restart("engine-1")
    assert await setup.publisher.repair() == ("engine-1",)
    assert sorted(setup.trainer.sent_bytes) == BUCKETS
    assert torch.equal(setup.fleet.tensors["engine-1"]["a"], right)


def _spoil_base(host: Path) -> None:
    [base] = host.glob("v*/bucket-00001.safetensors")
    data = bytearray(base.read_bytes())
    data[-1500] ^= 64  # in "a", in a row that does not change
    base.write_bytes(data)
