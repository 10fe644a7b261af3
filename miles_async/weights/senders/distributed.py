"""Staged weights over torch process groups of their own: NCCL between GPUs, gloo between hosts."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from miles_async.types import StagedWeights
from miles_async.weights.senders.own_stream import own_stream
from miles_async.weights.senders.weight_group import GroupBrokenError, WeightGroup
from miles_async.weights.staging import Staging, StagingOptions

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A bucket's bytes on the device, ahead of their turn."""

    staged: StagedWeights | None
    index: int
    data: torch.Tensor


class DistributedSender(Staging):
    """Implements WeightSender. A member that fails or stays away breaks its group, not the trainer, nor other groups.

    Calls that concern different groups may come from different threads.
    """

    def __init__(
        self, staging: StagingOptions, *, address: str, backend: str, device: torch.device, timeout_seconds: float
    ) -> None:
        """``address``: where engines reach this process. ``timeout_seconds``: of one bucket and, at most, of a join."""
        super().__init__(staging)
        self._address = address
        self._backend = backend
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._groups: dict[str, WeightGroup] = {}
        self._loaded: dict[str, _Loaded] = {}  # by group

    def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        """Listen. Returns (address, port) for the engines to join at."""
        assert group_name not in self._groups, f"process group {group_name} is open already"
        group = self._groups[group_name] = WeightGroup(
            group_name,
            world_size,
            address=self._address,
            backend=self._backend,
            device=self._device,
            timeout_seconds=self._timeout_seconds,
        )
        return self._address, group.port

    def join_group(self, group_name: str) -> None:
        """Returns when all members are there, or when they were not within the timeout: then those that wait are told
        so, and say it themselves.
        """
        try:
            self._groups[group_name].join()
        except GroupBrokenError as error:  # supervision point: engines fail, the trainer goes on
            log.warning("process group incomplete", group=group_name, error=str(error))

    def load_bucket(self, group_name: str, version: int, index: int) -> None:
        """Copy a staged bucket to the device, ahead of its turn. No more than one of a group is held."""
        self._loaded.pop(group_name, None)
        self._loaded[group_name] = _Loaded(self._staged.get(version), index, self._on_device(version, index))

    def send_bucket(self, group_name: str, version: int, index: int) -> str | None:
        """Broadcast all bytes of a staged bucket as one uint8 tensor. Why that failed, or None."""
        data = self._take(group_name, version, index)
        try:
            self._groups[group_name].broadcast(data)
        except GroupBrokenError as error:  # supervision point: as in join_group
            log.warning("process group broke while sending", group=group_name, error=str(error))
            return f"the sender's process group broke: {error}"
        return None

    def leave_group(self, group_name: str) -> None:
        """No-op if there is no such group."""
        self._loaded.pop(group_name, None)
        if group := self._groups.pop(group_name, None):
            group.leave()

    def close(self) -> None:
        for name in list(self._groups):
            self.leave_group(name)
        super().close()

    def _take(self, group_name: str, version: int, index: int) -> torch.Tensor:
        """What was loaded ahead, unless that was another bucket, or the version was staged again since."""
        loaded = self._loaded.pop(group_name, None)
        if loaded is not None and loaded.staged is self._staged.get(version) and loaded.index == index:
            return loaded.data
        return self._on_device(version, index)

    def _on_device(self, version: int, index: int) -> torch.Tensor:
        with own_stream(self._device):
            data = self.bucket(version, index).to(self._device)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # it is sent on another stream
        return data
