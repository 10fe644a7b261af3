"""The sending rank's half of ``distributed``."""

from __future__ import annotations

import mmap

import msgspec
import structlog
import torch

from miles_async.errors import TrainerError
from miles_async.types import StagedWeights
from miles_async.weights.staging import Staging
from miles_async.weights.transports.distributed.driver import process_group_backend
from miles_async.weights.transports.distributed.weight_group import GroupBrokenError, WeightGroup
from miles_async.weights.transports.own_stream import OwnStream, sending_device
from miles_async.weights.transports.spec import RankSide

log = structlog.get_logger(__name__)


class DistributedSender(Staging):
    """Implements Broadcasts, which describes its methods.

    Calls that concern different process groups may come from different threads.
    """

    def __init__(self, side: RankSide) -> None:
        super().__init__(side.staging)
        self._side = side
        self._device = sending_device(side.device)
        self._copying = OwnStream(self._device)
        self._groups: dict[str, WeightGroup] = {}
        self._mapped: dict[int, dict[int, torch.Tensor]] = {}  # buckets of each staged version

    def stage(self, version: int) -> StagedWeights:
        """Stage, and map every page while training continues: in the pause it would take half as long as sending. A GPU
        is sent to from the copy instead.
        """
        self._mapped.pop(version, None)
        staged = super().stage(version)
        if self._device.type != "cpu":
            return staged
        mapped = {index: self.bucket(version, index) for index in staged.buckets}
        for bucket in mapped.values():
            bucket[:: mmap.PAGESIZE].numpy().max(initial=0)
        self._mapped = {old: self._mapped[old] for old in self._mapped.keys() & self._staged.keys()} | {version: mapped}
        return staged

    def bucket(self, version: int, index: int) -> torch.Tensor:
        mapped = self._mapped.get(version)
        return mapped[index] if mapped is not None else super().bucket(version, index)

    def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        assert group_name not in self._groups, f"process group {group_name} is open already"
        group = self._groups[group_name] = WeightGroup(
            group_name,
            world_size,
            address=self._side.address,
            ports=self._side.ports,
            backend=process_group_backend(self._side.device),
            device=self._device,
            timeout_seconds=self._side.timeout_seconds,
        )
        return self._side.address, group.port

    def join_group(self, group_name: str) -> None:
        try:
            self._groups[group_name].join()
        except GroupBrokenError as error:  # supervision point: engines fail, the trainer continues
            log.warning("process group incomplete", group=group_name, error=str(error))

    def send(self, group_name: str, version: int, announce: bool) -> str | None:
        if version not in self._staged:
            raise TrainerError(f"weights of version {version} are not staged, only {list(self._staged)}")
        group, buckets = self._groups[group_name], self._staged[version].buckets
        relayed = announce and self._device.type == "cpu"
        try:
            if announce:
                self._announce(group, msgspec.msgpack.encode(buckets))
            loading = (self._on_device(version, index) for index in buckets)
            data = next(loading, None)
            while data is not None:
                with group.sending(data, relayed=relayed):
                    data = next(loading, None)
        except GroupBrokenError as error:  # supervision point: as in join_group
            log.warning("process group broke while sending", group=group_name, error=str(error))
            return f"the sender's process group broke: {error}"
        except torch.OutOfMemoryError as error:  # supervision point: training may leave more memory for a retry
            log.warning("out of memory while sending", group=group_name, error=str(error))
            return f"the sender's device is out of memory (lower --update-weight-buffer-size): {error}"
        return None

    def leave_group(self, group_name: str) -> None:
        if group := self._groups.pop(group_name, None):
            group.leave()

    def close(self) -> None:
        for name in list(self._groups):
            self.leave_group(name)
        self._mapped.clear()
        super().close()

    def _announce(self, group: WeightGroup, manifest: bytes) -> None:
        """Broadcast the manifest of this sender's buckets, after its length."""
        for data in (torch.tensor([len(manifest)]), torch.frombuffer(bytearray(manifest), dtype=torch.uint8)):
            with self._copying.used():
                data = data.to(self._device)
            with group.sending(data):
                pass

    def _on_device(self, version: int, index: int) -> torch.Tensor:
        with self._copying.used():
            return self.on_device(version, index, self._device)
