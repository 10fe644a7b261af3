"""A trainer that only takes time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from miles_async.errors import ProcessLostError
from miles_async.runtime.files.digests import digest_pieces, split, write_digested
from miles_async.simulation.engine import TENSORS, canary_logprobs, simulated_digest
from miles_async.simulation.recording import EventLog
from miles_async.simulation.settings import SimulationSettings
from miles_async.types import SettingValue, StagedWeights, TensorMeta, TokenScores, TrainShard
from miles_async.weights.transports.distributed.driver import Broadcasts

CANARY = (1, 2, 3)
POSITION_FILE = "position.json"  # its part of a checkpoint


class SimulatedTrainer:
    """Implements TrainerSide."""

    def __init__(self, settings: SimulationSettings, log: EventLog) -> None:
        self._settings = settings
        self._log = log
        self._steps = 0
        self._staged = Path(), 0  # directory and state of the last save
        self._train_times = random.Random(f"{settings.seed} trainer")
        self._publish_times = random.Random(f"{settings.seed} publications")
        self.token_scores: Sequence[TokenScores] = ()

    async def start(self) -> None: ...

    async def train(self, shards: Sequence[object]) -> Mapping[str, float]:
        step = self._steps + 1
        if self._settings.faults.trainer_fails_at_step == step:
            raise ProcessLostError(f"rank 0 died in step {step} (simulated)")
        shard = shards[0]
        assert isinstance(shard, TrainShard)  # itself: there is no object store
        self._log.add("train", step=step, version=shard.target_version)
        await asyncio.sleep(self._settings.train_seconds.draw(self._train_times))
        self._steps = step
        return {"loss": 0.0}

    async def change(self, values: Mapping[str, SettingValue]) -> None: ...

    async def copy_weights(self, version: int) -> None:
        if self._settings.faults.publication_hangs_at_version == version:
            await asyncio.Event().wait()
        self._log.add("copy", version=version)
        await asyncio.sleep(self._settings.copy_seconds)

    async def stage_weights(self, version: int) -> StagedWeights:
        digest = simulated_digest(version)
        return StagedWeights(
            version=version,
            directory="",
            buckets={index: (TensorMeta(name, "float32", (1,), digest),) for index, name in enumerate(TENSORS)},
            total_bytes=4 * len(TENSORS),
            canary_tokens=CANARY,
            canary_logprobs=canary_logprobs(version, len(CANARY)),
            copy_seconds=self._settings.copy_seconds,
            prepare_seconds=self._settings.copy_seconds,
        )

    def sender(self, index: int, *, repair: bool = False) -> _Broadcaster:
        return _Broadcaster(self._send)

    async def _send(self) -> None:
        await asyncio.sleep(self._settings.publish_seconds.draw(self._publish_times))

    async def save(self, directory: Path) -> Mapping[str, str]:
        await self.stage_save(directory)
        return await self.write_save()

    async def stage_save(self, directory: Path) -> None:
        await asyncio.sleep(self._settings.copy_seconds)  # about as long
        self._staged = directory, self._steps

    async def write_save(self) -> Mapping[str, str]:
        directory, steps = self._staged
        await asyncio.sleep(self._settings.copy_seconds)
        await asyncio.to_thread(directory.mkdir)
        content = msgspec.json.encode({"step": steps})
        return {POSITION_FILE: await asyncio.to_thread(write_digested, directory / POSITION_FILE, content)}

    async def save_hf(self, directory: Path) -> None: ...

    async def load(self, directory: Path, *, step: int) -> None:
        content = await asyncio.to_thread((directory / POSITION_FILE).read_bytes)
        self._steps = msgspec.json.decode(content, type=dict[str, int])["step"]

    async def digests(self, directory: Path, sizes: Mapping[str, int]) -> Mapping[str, str]:
        return await asyncio.to_thread(digest_pieces, directory, split(sizes))

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Broadcaster:
    """Implements SenderHandle of ``distributed``: only sending takes time."""

    send: Callable[[], Awaitable[None]]

    async def call[*Ts, Result](self, method: Callable[[Any, *Ts], Result], *arguments: *Ts) -> Result:
        answer: Any = None
        if method is Broadcasts.open_group:
            answer = "127.0.0.1", 1
        elif method is Broadcasts.send:
            await self.send()
        return cast(Result, answer)
