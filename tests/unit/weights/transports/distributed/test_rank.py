"""What a sender broadcasts; test_trainer_ranks.py and test_weights_real.py have real groups."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from miles_async.errors import TrainerError
from miles_async.types import TensorMeta
from miles_async.weights.files import version_directory
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.distributed import weight_group
from miles_async.weights.transports.distributed.rank import DistributedSender
from miles_async.weights.transports.spec import RankSide

Sent = list[list[int]]


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[DistributedSender]:
    staging = StagingOptions(parent=tmp_path, bucket_bytes=8)
    opened = DistributedSender(RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=5))
    stage(opened, 0, 1.0)
    yield opened
    opened.close()


@pytest.fixture
def sent(sender: DistributedSender, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """Contents of what is broadcast, or sent to rank 1, which comes after a 1."""
    contents: Sent = []

    def note(data: torch.Tensor, **_: object) -> None:
        contents.append(data.tolist())

    class Group:
        def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> object:
            assert tag == 0
            contents.extend([rank, *tensor.tolist()] for tensor in tensors)
            return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(weight_group.dist, "broadcast", note)
    sender.open_group("g", 2)
    sender._groups["g"]._process_group = Group()  # type: ignore[assignment]
    yield contents
    sender._groups.clear()


def stage(sender: DistributedSender, version: int, value: float) -> None:
    """Two buckets."""
    sender.copy(version, [("0.a.weight", torch.full((2,), value)), ("1.a.weight", torch.full((2,), value + 1))])
    sender.stage(version)


def test_what_is_staged_is_mapped_page_by_page_until_it_is_removed(tmp_path: Path) -> None:
    def mapped() -> dict[str, list[int]]:
        """Directory of each version that is mapped: bytes of its files, and of the pages that are there."""
        found: dict[str, list[int]] = {}
        for mapping in psutil.Process().memory_maps(grouped=False):
            if mapping.path.startswith(str(tmp_path)):
                sizes = found.setdefault(Path(mapping.path).parent.name, [0, 0])
                sizes[:] = sizes[0] + mapping.size, sizes[1] + mapping.rss
        return found

    staging = StagingOptions(parent=tmp_path, bucket_bytes=1 << 20, keep=2)
    sender = DistributedSender(RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=5))
    for version in range(4):
        sender.copy(version, [(f"{layer}.weight", torch.ones(1 << 18)) for layer in range(3)])
        sender.stage(version)
        found = mapped()
        assert found.keys() == {version_directory(each) for each in range(version + 1)[-2:]}
        for size, there in found.values():
            assert 3 << 20 <= size <= there + 3 * mmap.PAGESIZE  # but for the last one of each of three buckets
    sender.close()
    assert mapped() == {}


def test_all_buckets_are_sent_and_the_next_one_is_loaded_meanwhile(
    sender: DistributedSender, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C8
    loaded, plain, states = threading.Event(), sender._on_device, []

    def load(version: int, index: int) -> torch.Tensor:
        if index == 1:
            loaded.set()
        return plain(version, index)

    def broadcast(data: torch.Tensor, **_: object) -> None:
        states.append(loaded.wait(5))

    monkeypatch.setattr(sender, "_on_device", load)
    monkeypatch.setattr(weight_group.dist, "broadcast", broadcast)
    assert sender.send("g", 0, announce=False) is None
    assert states == [True, True]


def test_running_out_of_memory_is_a_reason_to_retry(
    sender: DistributedSender, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(version: int, index: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sender, "_on_device", load)
    problem = sender.send("g", 0, announce=False)
    assert problem is not None
    assert "--update-weight-buffer-size" in problem


def test_what_engines_need_to_know_goes_ahead(sender: DistributedSender, sent: Sent) -> None:
    # covers: C8
    assert sender.send("g", 0, announce=True) is None
    length, manifest, *buckets = sent
    assert length == [len(manifest)]
    assert msgspec.msgpack.decode(bytes(manifest), type=dict[int, tuple[TensorMeta, ...]]) == {
        index: sender.metas(0, index) for index in (0, 1)
    }
    assert [rank for rank, *_ in buckets] == [1, 1], "engines pass them on"
    assert [torch.tensor(bucket, dtype=torch.uint8).view(torch.float32).tolist() for _, *bucket in buckets] == [
        [1, 1],
        [2, 2],
    ]


def test_a_sender_without_a_share_announces_that(tmp_path: Path, sender: DistributedSender, sent: Sent) -> None:
    sender.copy(1, [])
    sender.stage(1)
    assert sender.send("g", 1, announce=True) is None
    assert len(sent) == 2


def test_a_version_that_is_gone_is_an_error_not_the_weights_of_another(sender: DistributedSender) -> None:
    with pytest.raises(TrainerError, match="version 9 are not staged"):
        sender.send("g", 9, announce=True)
