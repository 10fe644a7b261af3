"""Order and memory of buckets that are received, with stand-ins for what brings them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from miles_async.engines.sglang import stream_buckets
from miles_async.engines.sglang.relay import Route, find_routes
from miles_async.engines.sglang.stream_buckets import Bucket, receive
from miles_async.types import TensorMeta

GROUP: Any = "a group"


class Logged:
    """A Line whose buckets are there at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.started = 0

    def start(self, group: Any, size: int) -> Any:
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


def test_a_gpu_gets_broadcasts_into_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's "meta" device, which has no memory."""
    # covers: C8
    manifest = msgspec.msgpack.encode({i: (TensorMeta(f"t{i}", "float32", (8 - i % 2,)),) for i in range(8)})
    pending = [torch.tensor([len(manifest)]), torch.frombuffer(bytearray(manifest), dtype=torch.uint8)]
    into = []

    class Work:
        def wait(self) -> None: ...

    def broadcast(data: torch.Tensor, *, src: int, async_op: bool = False, **_: Any) -> Any:
        assert src == 0
        if not async_op:
            return data.copy_(pending.pop(0))
        into.append(id(data.untyped_storage()))
        return Work()

    monkeypatch.setattr(stream_buckets.dist, "broadcast", broadcast)
    monkeypatch.setattr(stream_buckets, "Relay", None)
    line = stream_buckets.Broadcasts(torch.device("cpu"))
    buckets = [Bucket(index, (TensorMeta(f"t{index}", "float32", (8 - index % 2,)),), GROUP) for index in range(8)]
    seen = [tensor.data_ptr() for [(_, tensor)] in receive(buckets, line, at_once=2)]
    assert len(set(seen)) == 2


def test_buckets_go_from_node_to_node_and_are_read_by_all_ranks_there() -> None:
    assert find_routes([1]) == {1: Route(0)}
    assert find_routes([1, 2, 1, 2, 5]) == {
        1: Route(0, next=2, readers=(3,)),
        2: Route(1, next=5, readers=(4,)),
        3: Route(1, shared=True),
        4: Route(2, shared=True),
        5: Route(2),
    }
