"""A sender on a GPU copies its buckets on one stream: what PyTorch caches for a stream, no other stream uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports import ipc_rank
from miles_async.weights.transports.distributed.rank import DistributedSender
from miles_async.weights.transports.ipc_rank import IpcSender
from miles_async.weights.transports.own_stream import OwnStream
from miles_async.weights.transports.spec import RankSide


class Streams:
    """Stand-in for streams of a device: counts those made, and remembers which ones were used."""

    def __init__(self) -> None:
        self.made: list[object] = []
        self.used: list[object] = []

    def make(self, _: object) -> object:
        self.made.append(object())
        return self.made[-1]

    def use(self, stream: object) -> AbstractContextManager[None]:
        self.used.append(stream)
        return nullcontext()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr("torch.cuda.Stream", streams.make)
    monkeypatch.setattr("torch.cuda.stream", streams.use)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: None)
    monkeypatch.setattr(ipc_rank, "handles", lambda *_: "")
    return streams


def broadcasts(side: RankSide) -> Callable[[int], object]:
    sender = DistributedSender(side)
    sender.bucket = lambda *_: torch.empty(1, device="meta")  # type: ignore[method-assign]
    return lambda index: sender._on_device(0, index)


def shares(side: RankSide) -> Callable[[int], object]:
    sender = IpcSender(side)
    sender.bucket = lambda *_: torch.empty(1, device="meta")  # type: ignore[method-assign]
    sender.metas = lambda *_: ()  # type: ignore[method-assign]
    return lambda index: sender.share_bucket("engine", 0, index)


@pytest.mark.parametrize("sender", [broadcasts, shares])
def test_a_sender_copies_all_buckets_on_one_stream(
    streams: Streams,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sender: Callable[[RankSide], Callable[[int], object]],
) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _: tensor)
    staging = StagingOptions(parent=tmp_path, bucket_bytes=8)
    copy = sender(RankSide(staging=staging, address="127.0.0.1", device="cuda", timeout_seconds=5))
    for index in range(3):
        copy(index)
    assert len(streams.made) == 1
    assert streams.used == streams.made * 3


def test_a_cpu_has_no_streams(streams: Streams) -> None:
    with OwnStream(torch.device("cpu")).used():
        assert streams.made == streams.used == []
