"""What files for several engines of one node cost it, when engines share them and when each has its own.

The real transport by files and the real functions of hosts, in this process, in memory; synthetic weights in bfloat16.
Engines share files if their directories lie side by side: those that share none have each a parent of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from miles_async.seams import InferenceServer
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.staging import Staging
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.local_files import LocalFilesTransport
from miles_async.weights.transports.spec import DriverSide
from tests.benchmarks.report import Row

WIDTH, MATRICES = 1024, 48  # 50 M parameters
BUCKET_BYTES = 16 * 2**20
CHANGED = 0.02  # of all elements from version to version
VERSIONS = 3  # after the first; the best is shown
MOST_ENGINES = 4


class Hosts:
    """EngineFleet, as far as files on hosts need one."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = {Incarnation(f"engine-{i}", 0): directory for i, directory in enumerate(directories)}
        self.version = "none"  # that the servers hold

    async def on_host(
        self, engines: Sequence[Incarnation], function: Callable[..., object], *arguments: object, room: int = 0
    ) -> Mapping[Incarnation, object]:
        return {engine: function(self.directories[engine], *arguments) for engine in engines}

    async def call(self, engines: Sequence[Incarnation], operation: Callable[..., object]) -> Mapping[Incarnation, str]:
        assert operation is InferenceServer.weight_version
        return dict.fromkeys(engines, self.version)


def rows(width: int = WIDTH, matrices: int = MATRICES) -> Iterator[Row]:
    """By deltas and number of engines."""
    for delta in (False, True):
        for engines in (1, 2, MOST_ENGINES):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                yield asyncio.run(measure(Path(directory), width, matrices, engines, delta=delta))


async def measure(directory: Path, width: int, matrices: int, engines: int, *, delta: bool) -> Row:
    model = {f"layers.{i}.linear.weight": torch.randn(width, width).to(torch.bfloat16) for i in range(matrices)}
    options = StagingOptions(parent=directory / "staged", bucket_bytes=BUCKET_BYTES, delta="xor" if delta else None)
    staging = Staging(options)
    fleets = {
        "shared": Hosts([directory / "node" / str(engine) for engine in range(engines)]),
        "own": Hosts([directory / f"node {engine}" / "0" for engine in range(engines)]),
    }
    transports = {name: make_transport(fleet, delta=delta) for name, fleet in fleets.items()}
    seconds: dict[str, list[float]] = {name: [] for name in fleets}
    for version in range(1 + VERSIONS):
        for tensor in model.values():
            tensor.view(-1)[:: round(1 / CHANGED)] *= 1 + 2**-7
        staging.copy(version, model.items())
        staged = staging.stage(version)
        for name, fleet in fleets.items():
            started = time.process_time()
            errors = await transports[name].prepare(staged, tuple(fleet.directories))
            seconds[name].append(time.process_time() - started)
            assert not any(errors.values())
            fleet.version = str(version)
    held = {name: held_bytes(fleet) / staged.total_bytes for name, fleet in fleets.items()}
    staging.close()
    return {
        "engines": engines,
        "delta": "xor" if delta else "off",
        **{f"{name}_cpu_seconds": round(min(found[1:]), 3) for name, found in seconds.items()},
        **{f"{name}_memory_in_copies": round(copies, 2) for name, copies in held.items()},
    }


def make_transport(fleet: Hosts, *, delta: bool) -> LocalFilesTransport:
    for directory in fleet.directories.values():
        directory.mkdir(parents=True)

    async def path(staged: StagedWeights, _: int, name: str) -> str:
        return str(Path(staged.directory) / name)

    side: DriverSide[Any] = DriverSide(sender=no_sender, fleet=fleet, name="weights", delta=delta)  # type: ignore[arg-type]
    return LocalFilesTransport(side, path)


def no_sender(index: int) -> Any:
    raise AssertionError("files are read by their path")


def held_bytes(fleet: Hosts) -> int:
    """Bytes of the files of all engines; those that several of them share count once."""
    files = [path.stat() for directory in fleet.directories.values() for path in directory.rglob("*.safetensors")]
    return sum({status.st_ino: status.st_size for status in files}.values())
