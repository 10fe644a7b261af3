"""The sending rank's half of ``distributed``."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from miles_async.types import StagedWeights
from miles_async.weights.staging import Staging
from miles_async.weights.transports.distributed.driver import process_group_backend
from miles_async.weights.transports.distributed.weight_group import GroupBrokenError, WeightGroup
from miles_async.weights.transports.own_stream import own_stream
from miles_async.weights.transports.spec import RankSide

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A bucket's bytes on the device, ahead of their turn."""

    staged: StagedWeights | None
    index: int
    data: torch.Tensor


class DistributedSender(Staging):
    """Implements Broadcasts, which describes its methods.

    Calls that concern different process groups may come from different threads.
    """

    def __init__(self, side: RankSide) -> None:
        super().__init__(side.staging)
        self._side = side
        self._device = torch.device(side.device)
        self._groups: dict[str, WeightGroup] = {}
        self._loaded: dict[str, _Loaded] = {}  # by process group

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
        except GroupBrokenError as error:  # supervision point: engines fail, the trainer goes on
            log.warning("process group incomplete", group=group_name, error=str(error))

    def load_bucket(self, group_name: str, version: int, index: int) -> None:
        self._loaded.pop(group_name, None)  # freed before the next one is allocated
        self._loaded[group_name] = _Loaded(self._staged.get(version), index, self._on_device(version, index))

    def send_bucket(self, group_name: str, version: int, index: int) -> str | None:
        data = self._take(group_name, version, index)
        try:
            self._groups[group_name].broadcast(data)
        except GroupBrokenError as error:  # supervision point: as in join_group
            log.warning("process group broke while sending", group=group_name, error=str(error))
            return f"the sender's process group broke: {error}"
        return None

    def leave_group(self, group_name: str) -> None:
        self._loaded.pop(group_name, None)
        if group := self._groups.pop(group_name, None):
            group.leave()

    def close(self) -> None:
        for name in list(self._groups):
            self.leave_group(name)
        super().close()

    def _take(self, group_name: str, version: int, index: int) -> torch.Tensor:
        """The bucket that was loaded ahead, unless that was another one or the version was staged again since."""
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
