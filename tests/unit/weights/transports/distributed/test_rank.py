"""Buckets that are loaded ahead of their turn; test_trainer_ranks.py and test_weights_real.py have real groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_async.errors import TrainerError
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.distributed import weight_group
from miles_async.weights.transports.distributed.rank import DistributedSender
from miles_async.weights.transports.spec import RankSide

Sent = list[list[float]]


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[DistributedSender]:
    staging = StagingOptions(parent=tmp_path, bucket_bytes=8)
    opened = DistributedSender(RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=5))
    stage(opened, 0, 1.0)
    yield opened
    opened.close()


@pytest.fixture
def sent(sender: DistributedSender, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """What is broadcast."""
    broadcast: Sent = []

    def note(data: torch.Tensor, **_: Any) -> None:
        broadcast.append(data.clone().view(torch.float32).tolist())

    monkeypatch.setattr(weight_group.dist, "broadcast", note)
    sender.open_group("g", 2)
    sender._groups["g"]._process_group = object()  # type: ignore[assignment]
    yield broadcast
    sender._groups.clear()


def stage(sender: DistributedSender, version: int, value: float) -> None:
    """Two buckets."""
    sender.stage(version, [("0.a.weight", torch.full((2,), value)), ("1.a.weight", torch.full((2,), value + 1))])


def test_a_bucket_that_was_loaded_ahead_is_sent(sender: DistributedSender, sent: Sent) -> None:
    sender.send_bucket("g", 0, 0)
    sender.load_bucket("g", 0, 1)
    (sender.file(0, "bucket-00001.safetensors")).unlink()  # it is not read again
    sender.send_bucket("g", 0, 1)
    assert sent == [[1, 1], [2, 2]]
    with pytest.raises(FileNotFoundError):
        sender.send_bucket("g", 0, 1)  # nor kept


@pytest.mark.parametrize("loaded", [(0, 0), (1, 1)])
def test_another_bucket_is_not(sender: DistributedSender, sent: Sent, loaded: tuple[int, int]) -> None:
    stage(sender, 1, 5.0)
    sender.load_bucket("g", *loaded)
    sender.send_bucket("g", 0, 1)
    assert sent == [[2, 2]]


def test_nor_one_of_weights_that_were_staged_again_since(sender: DistributedSender, sent: Sent) -> None:
    sender.load_bucket("g", 0, 0)
    stage(sender, 0, 7.0)
    sender.send_bucket("g", 0, 0)
    assert sent == [[7, 7]]


def test_a_version_that_is_gone_is_an_error_not_the_bucket_of_another(sender: DistributedSender) -> None:
    with pytest.raises(TrainerError, match="version 9 are not staged"):
        sender.load_bucket("g", 9, 0)
