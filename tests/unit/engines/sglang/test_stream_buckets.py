"""Order and memory of buckets that are received, with stand-ins for what brings them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from miles_async.engines.sglang import relay, stream_buckets
from miles_async.engines.sglang.relay import Relay, Route, find_routes
from miles_async.engines.sglang.stream_buckets import Bucket, receive
from miles_async.types import TensorMeta

GROUP = "a group"


class Logged:
    """A Line whose buckets are there at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.started = 0

    def start(self, group: object, size: int) -> _Arriving:
        index, self.started = self.started, self.started + 1
        self.log.append(f"start {index}")
        assert size == 4 * (1 + index)
        return _Arriving(self.log, index)

    def finish(self) -> None:
        self.log.append("finish")


class _Arriving:
    def __init__(self, log: list[str], index: int) -> None:
        self._log, self._index = log, index

    def wait(self) -> torch.Tensor:
        self._log.append(f"have {self._index}")
        return torch.full((8,), float(self._index)).view(torch.uint8)

    def loaded(self) -> None:
        self._log.append(f"loaded {self._index}")


def test_the_next_buckets_are_received_while_one_is_loaded() -> None:
    # covers: C8
    line = Logged()
    buckets = [Bucket(index, (TensorMeta(f"t{index}", "float32", (1 + index,)),), GROUP) for index in range(5)]
    for [(name, tensor)] in receive(buckets, line, at_once=3):
        line.log.append(f"load {name}")
        index = int(name[1:])
        assert tensor.tolist() == [index] * (1 + index)
    assert line.log == [
        "start 0", "start 1", "start 2", "have 0", "load t0", "loaded 0", "start 3", "have 1", "load t1", "loaded 1",
        "start 4", "have 2", "load t2", "loaded 2", "have 3", "load t3", "loaded 3", "have 4", "load t4", "loaded 4",
        "finish",
    ]  # fmt: skip


def test_broadcasts_come_into_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C8
    def broadcast(data: torch.Tensor, *, src: int, group: object, async_op: bool) -> SimpleNamespace:
        assert (src, group, async_op) == (0, GROUP, True)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(stream_buckets.dist, "broadcast", broadcast)
    buckets = [Bucket(index, (TensorMeta(f"t{index}", "float32", (8 - index % 2,)),), GROUP) for index in range(8)]
    line = stream_buckets.Broadcasts(torch.device("cpu"))
    assert len({tensor.data_ptr() for [(_, tensor)] in receive(buckets, line, at_once=2)}) == 2


class RecordedGroup:
    """A process group whose operations end when they are waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, tensors: object, rank: int, tag: int) -> SimpleNamespace:
        return self._work(f"{NAMES[tag]} to {rank}")

    def recv(self, tensors: object, rank: int, tag: int) -> SimpleNamespace:
        return self._work(f"{NAMES[tag]} from {rank}")

    def _work(self, name: str) -> SimpleNamespace:
        number = self.log.count(name)
        self.log.append(name)
        return SimpleNamespace(wait=lambda: self.log.append(f"had {name} {number}"))


MakeRelay = Callable[[Route], tuple[Relay, RecordedGroup]]
NAMES = {relay.BUCKET: "bucket", relay._READY: "ready", relay._DONE: "done"}


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> MakeRelay:
    """A relay with two slots, at some place of a chain, and its group."""

    def make(route: Route) -> tuple[Relay, RecordedGroup]:
        group = RecordedGroup()
        monkeypatch.setattr(relay, "_find_route", lambda *_: (route, None))
        return Relay(group, at_once=1, largest=4), group

    return make


def test_memory_is_not_used_again_before_everybody_has_what_is_in_it(
    relayed: MakeRelay,
) -> None:
    # covers: C8
    line, group = relayed(Route(0, next=4, readers=(2,)))
    for _ in range(2):
        arriving = line.start(group, 4)
        arriving.wait()
        arriving.loaded()
    before = len(group.log)
    line.start(group, 4)
    assert group.log[before:] == ["had bucket to 4 0", "had ready to 2 0", "had done from 2 0", "bucket from 0"]
    before = len(group.log)
    line.finish()
    assert group.log[before:] == ["had bucket to 4 1", "had ready to 2 1", "had done from 2 1"]


def test_a_reader_says_when_it_has_loaded_a_bucket(relayed: MakeRelay) -> None:
    # covers: C8
    line, group = relayed(Route(1, shared=True))
    arriving = line.start(group, 4)
    assert group.log == ["ready from 1"]
    arriving.wait()
    assert group.log[1:] == ["had ready from 1 0"]
    arriving.loaded()
    assert group.log[2:] == ["done to 1"]


def test_buckets_go_from_node_to_node_and_are_read_by_all_ranks_there() -> None:
    assert find_routes([1]) == {1: Route(0)}
    assert find_routes([1, 2, 1, 2, 5]) == {
        1: Route(0, next=2, readers=(3,)),
        2: Route(1, next=5, readers=(4,)),
        3: Route(1, shared=True),
        4: Route(2, shared=True),
        5: Route(2),
    }
