"""A transport of a user's, all of it in this file: the rank's half hands files to the driver, which passes them on."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import pytest
import torch

from miles_async.arguments import WeightsArguments
from miles_async.errors import ConfigurationError
from miles_async.seams import WeightSender
from miles_async.types import StagedWeights
from miles_async.weights.staging import Staging
from miles_async.weights.transports.choice import count_senders, find_transport, make_sender
from miles_async.weights.transports.host_files import Source
from miles_async.weights.transports.local_files import LocalFilesTransport
from miles_async.weights.transports.spec import DriverSide, RankSide, TransportSpec
from tests.fakes.fake_sides import CANARY, CANARY_LOGPROBS, FakeTrainer, InProcess, publish
from tests.fakes.publishers import publisher_of
from tests.unit.weights.transports.test_local_files import FileFleet


class ReadsFiles(WeightSender, Protocol):
    """The rank's half as the driver's half calls it."""

    def read(self, version: int, name: str) -> bytes: ...


class ReadingSender(Staging):
    """The rank's half. A ``rank`` function imports it in the sending rank, where torch is."""

    def read(self, version: int, name: str) -> bytes:
        return self.file(version, name).read_bytes()


def make_driver(side: DriverSide[ReadsFiles]) -> LocalFilesTransport:
    """The driver's half."""

    async def read(staged: StagedWeights, index: int, name: str) -> Source:
        content = await side.sender(index % staged.senders).call(ReadsFiles.read, staged.version, name)
        return np.frombuffer(content, np.uint8)

    return LocalFilesTransport(side, read)


def make_rank(side: RankSide) -> ReadingSender:
    return ReadingSender(side.staging)


SPEC = TransportSpec(name="through the driver", driver=make_driver, rank=make_rank, sender_per_stage=True, delta=True)

NAMED = f"{__name__}:SPEC"
TENSORS = {f"{index}.linear.weight": torch.full((100,), float(index)) for index in range(4)}


class StagingTrainer(FakeTrainer):
    """Really stages weights, by as many senders as the transport wants."""

    def __init__(self, events: list[str], halves: list[WeightSender]) -> None:
        super().__init__(events, senders=len(halves))
        self._halves = halves

    async def copy_weights(self, version: int) -> None:
        tensors = {name: tensor + version for name, tensor in TENSORS.items()}
        for half in self._halves:
            half.copy(version, tensors.items())

    async def stage_weights(self, version: int) -> StagedWeights:
        from miles_async.trainer.ranks import united

        staged = united([half.stage(version) for half in self._halves])
        return msgspec.structs.replace(staged, canary_tokens=CANARY, canary_logprobs=CANARY_LOGPROBS)

    def sender(self, index: int, *, repair: bool = False) -> InProcess:
        return InProcess(self._halves[index])


async def test_weights_are_published_through_it(tmp_path: Path) -> None:
    # covers: C8
    arguments = WeightsArguments(
        weight_transport=NAMED,
        verify_weights="canary",
        update_weight_buffer_size=400,
        weight_staging_dir=tmp_path / "staged",
    )
    senders = count_senders(arguments, pipeline_stages=2)
    assert senders == 2
    halves = [make_sender(arguments, "cpu", "127.0.0.1", sender=index, senders=senders) for index in range(senders)]
    (tmp_path / "engines").mkdir()
    fleet = FileFleet(tmp_path / "engines", ["engine-0", "engine-1"])
    trainer = StagingTrainer(fleet.events, halves)
    publisher = publisher_of(trainer, fleet, arguments)
    for version in (0, 1):
        publication = await publish(publisher, version)
        assert publication.engines == ("engine-0", "engine-1")
        for held in fleet.tensors.values():
            assert held.keys() == TENSORS.keys()
            assert all(torch.equal(held[name], tensor + version) for name, tensor in TENSORS.items())
    for half in halves:
        half.close()


def test_it_is_found_by_its_address_and_says_when_it_is_none() -> None:
    assert find_transport(NAMED) is SPEC
    with pytest.raises(ConfigurationError, match=r"--weight-transport .*:TENSORS: expected a TransportSpec"):
        find_transport(f"{__name__}:TENSORS")
    with pytest.raises(ConfigurationError, match=r"--weight-transport \S+:SPECK: .* did you mean SPEC\?"):
        find_transport(f"{__name__}:SPECK")
