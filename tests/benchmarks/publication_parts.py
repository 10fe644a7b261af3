"""Ends of publications that are measured: a sender that is a trainer's sending rank but for the training, and a
receiver that takes weights as an engine does; each runs in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from miles_async.runtime.files.scratch import MEMORY
from miles_async.types import StagedWeights, TensorMeta
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.spec import RankSide

if TYPE_CHECKING:
    import torch

SIZES = {"50M": (1024, 48), "500M": (2048, 119)}  # parameters → width and number of square matrices
# Few tensors each, and less than 32 MiB: what glibc takes from the system and gives back every time when it is more.
BUCKET_BYTES = 24 * 2**20
CHANGED = 0.02  # of all elements from version to version, where what changed is sent
CANARY = 32  # tokens


@dataclass(frozen=True)
class Place:
    """Where a process runs: on this host, or on a machine of ``tests/cluster``."""

    address: str = "127.0.0.1"
    first_process: int | None = None  # id of the machine's, as this host sees it

    def enter(self) -> None:
        """Use the machine's network only, and share no memory with other machines."""
        if self.first_process is None:
            return
        from miles_async.engines.sglang import relay

        with open(f"/proc/{self.first_process}/ns/net") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NETWORK) == 0
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        node = self.first_process
        relay._node = lambda: node


HERE = Place()
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class Part:
    """Something that runs in a process of its own."""

    def cpu_seconds(self) -> float:
        return time.process_time()


class Receiver(Part):
    """An engine's end."""

    def __init__(self, width: int, matrices: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as SGLang has, its own
        self.parameters = model(width, matrices, seed=1)
        self.groups: dict[str, object] = {}
        self._copies = True
        self._directory = tempfile.TemporaryDirectory(dir=MEMORY)

    def join(self, name: str, rank: int, address: str, port: int, world_size: int) -> None:
        from tests.integration.weight_receiver import init_custom_process_group

        self.groups[name] = init_custom_process_group(address, port, name, rank, world_size)

    def leave(self, name: str) -> None:
        import torch.distributed as dist

        dist.destroy_process_group(self.groups.pop(name))

    def receive(self, name: str, metas: tuple[TensorMeta, ...]) -> None:
        import torch
        import torch.distributed as dist

        sizes = [self.parameters[meta.name].nbytes for meta in metas]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.groups[name])
        for meta, part in zip(metas, data.split(sizes), strict=True):
            self.parameters[meta.name].copy_(part.view(torch.float32).reshape(meta.shape))

    def receive_plainly(self, name: str, sizes: Sequence[int]) -> None:
        import torch
        import torch.distributed as dist

        data = torch.empty(max(sizes), dtype=torch.uint8)
        for size in sizes:
            dist.broadcast(data[:size], src=0, group=self.groups[name])

    def copy_no_more(self) -> None:
        """Leave what :meth:`receive_stream` receives where it arrives."""
        self._copies = False

    def receive_stream(self, names: Sequence[str]) -> None:
        import torch

        from miles_async.engines.sglang.stream_buckets import received

        for tensors in received([self.groups[name] for name in names], torch.device("cpu")):
            for name, tensor in tensors if self._copies else ():
                self.parameters[name].copy_(tensor)

    def receive_all(self, name: str, buckets: Sequence[tuple[TensorMeta, ...]]) -> None:
        for metas in buckets:
            self.receive(name, metas)

    def load(self, directory: str) -> None:
        from safetensors.torch import load_file

        for path in Path(directory).glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                self.parameters[name].copy_(tensor)

    def on_host(self, function: Callable[..., object], arguments: tuple[object, ...]) -> object:
        return function(Path(self._directory.name), *arguments)

    def score(self) -> float:
        """As much as a forward pass of the canary."""
        import torch

        hidden = torch.ones(CANARY, next(iter(self.parameters.values())).shape[1])
        for parameter in self.parameters.values():
            hidden = torch.tanh(hidden @ parameter)
        return float(hidden.sum())


class Sender(Part):
    """The trainer's sending rank."""

    def __init__(
        self,
        directory: str,
        address: str,
        width: int,
        matrices: int,
        *,
        delta: bool,
        bucket_bytes: int,
        sender: int,
        senders: int,
    ) -> None:
        import torch

        from miles_async.weights.transports.distributed.rank import DistributedSender

        torch.set_num_threads(1)
        self.model = model(width, matrices, seed=0)
        self._changing = delta
        self._copy_seconds = 0.0
        staging = StagingOptions(
            parent=Path(directory),
            bucket_bytes=bucket_bytes,
            sender=sender,
            senders=senders,
            digests=delta,
            delta="xor" if delta else None,
        )
        self.sender = DistributedSender(RankSide(staging=staging, address=address, device="cpu", timeout_seconds=120))

    def copy(self, version: int) -> None:
        if self._changing:
            self._step()
        started = time.perf_counter()
        self.sender.copy(version, self.model.items())
        self._copy_seconds = time.perf_counter() - started

    def stage(self, version: int) -> StagedWeights:
        started = time.perf_counter()
        staged = self.sender.stage(version)
        seconds = self._copy_seconds + time.perf_counter() - started
        return msgspec.structs.replace(staged, copy_seconds=self._copy_seconds, prepare_seconds=seconds)

    def _step(self) -> None:

        for tensor in self.model.values():
            tensor.view(-1)[:: round(1 / CHANGED)] *= 1 + 2**-8

    def send_plainly(self, name: str, sizes: Sequence[int]) -> None:
        import torch
        import torch.distributed as dist

        data = torch.ones(max(sizes), dtype=torch.uint8)
        group = self.sender._groups[name]._process_group
        for size in sizes:
            dist.broadcast(data[:size], src=0, group=group)

    def call(self, method: Callable[..., object], *arguments: object) -> Any:
        return getattr(self.sender, method.__name__)(*arguments)


def model(width: int, matrices: int, seed: int) -> dict[str, torch.Tensor]:
    import torch

    draw = torch.Generator().manual_seed(seed)
    block = torch.randn(width, width, generator=draw) / width**0.5
    return {f"layers.{index}.linear.weight": block + index * 1e-3 for index in range(matrices)}


def serve(connection: Connection, make: Callable[[], Part], place: Place) -> None:
    """Call methods of a part by name, until told None."""
    place.enter()
    part = make()
    connection.send(None)
    while (call := connection.recv()) is not None:
        method, *rest = call
        try:
            connection.send(getattr(part, method)(*rest))
        except Exception as error:  # supervision point: the driver raises it
            connection.send(error)
