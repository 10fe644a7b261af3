"""Staged weights over a torch process group of their own: NCCL between GPUs, gloo between hosts.

Rank 0 is a sending rank of the trainer, the others are the engines (SGLang joins by ``init_custom_process_group``).
The group stands apart from the trainer's default group: own store, own name, own timeout.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import structlog
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _set_pg_timeout, _world

from miles_async.types import StagedWeights
from miles_async.weights.senders.own_stream import own_stream
from miles_async.weights.staging import Staging, StagingOptions

log = structlog.get_logger(__name__)

JOIN_SECONDS = 30.0  # an engine that is up joins in less than a second


@dataclass(slots=True)
class _Group:
    store: dist.TCPStore  # listens as long as the group lives
    world_size: int
    process_group: dist.ProcessGroup | None = None


class DistributedSender(Staging):
    """Implements WeightSender. A member that fails or stays away breaks the group, not the trainer:

    it is logged here and reported by the receivers; sending to a broken group does nothing.
    """

    def __init__(
        self, staging: StagingOptions, *, address: str, backend: str, device: torch.device, timeout_seconds: float
    ) -> None:
        """``address``: where engines reach this process. ``timeout_seconds``: of one bucket and, at most, of a join."""
        super().__init__(staging)
        self._address = address
        self._backend = backend
        self._device = device
        self._beside_training = own_stream(device)
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._join_timeout = datetime.timedelta(seconds=min(timeout_seconds, JOIN_SECONDS))
        self._groups: dict[str, _Group] = {}
        self._loaded: tuple[StagedWeights | None, int, torch.Tensor] | None = None  # a bucket, by index, and its bytes

    def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        """Listen; the port is the system's choice. Returns (address, port) for the engines to join at.

        Held from the start, so nobody can take it in between.
        """
        assert group_name not in self._groups, f"process group {group_name} is open already"
        store = dist.TCPStore(
            self._address, 0, world_size, is_master=True, timeout=self._join_timeout, wait_for_workers=False
        )
        self._groups[group_name] = _Group(store, world_size)
        return self._address, store.port

    def join_group(self, group_name: str) -> None:
        """Returns when all members are there, or when they were not within the timeout."""
        group = self._groups[group_name]
        try:
            group.process_group = self._new_process_group(group_name, group)
        except RuntimeError as error:  # supervision point: engines fail, the trainer goes on
            log.warning("process group incomplete", group=group_name, world_size=group.world_size, error=str(error))

    def load_bucket(self, version: int, index: int) -> None:
        """Copy a staged bucket to the device, ahead of its turn. No more than one is held."""
        self._loaded = None
        self._loaded = self._staged.get(version), index, self._on_device(version, index)

    def send_bucket(self, group_name: str, version: int, index: int) -> None:
        """Broadcast all bytes of a staged bucket as one uint8 tensor; returns when the last has left."""
        data = self._take(version, index)
        group = self._groups.get(group_name)
        if group is None or group.process_group is None:
            return
        try:
            with self._beside_training:
                dist.broadcast(data, src=0, group=group.process_group)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:  # supervision point: as in join_group
            log.warning("process group broke while sending", group=group_name, error=str(error))
            self._destroy(group)

    def leave_group(self, group_name: str) -> None:
        """No-op if there is no such group."""
        if group := self._groups.pop(group_name, None):
            self._destroy(group)

    def close(self) -> None:
        for name in list(self._groups):
            self.leave_group(name)
        super().close()

    def _take(self, version: int, index: int) -> torch.Tensor:
        """What was loaded ahead, unless that was another bucket, or the version was staged again since."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded[0] is self._staged.get(version) and loaded[1] == index:
            return loaded[2]
        return self._on_device(version, index)

    def _on_device(self, version: int, index: int) -> torch.Tensor:
        with self._beside_training:
            return self.bucket(version, index).to(self._device)

    def _new_process_group(self, name: str, group: _Group) -> dist.ProcessGroup:
        """What SGLang does on its side (init_custom_process_group), as rank 0.

        ``dist.new_group`` can't: its members would have to be ranks of the trainer's own world.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread, and this is not the trainer's
        process_group, _ = _new_process_group_helper(
            group.world_size,
            0,
            [],
            Backend(self._backend),
            PrefixStore(name, group.store),
            group_name=name,
            timeout=self._join_timeout,
        )
        _world.pg_group_ranks[process_group] = {rank: rank for rank in range(group.world_size)}
        _set_pg_timeout(self._timeout, process_group)  # of sending; joining has to be quick
        return process_group

    @staticmethod
    def _destroy(group: _Group) -> None:
        process_group, group.process_group = group.process_group, None
        if process_group is not None:
            dist.destroy_process_group(process_group)
