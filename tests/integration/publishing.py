"""A real Megatron trainer in this process, and publications of what it trains to real SGLang servers: every part of the
product between an optimizer step and an engine, without Ray.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save

from miles_async.arguments import WeightsArguments
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.kind import ServerSpec
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.seams import EngineFleet, InferenceServer, WeightSender
from miles_async.trainer.ranks import united
from miles_async.types import Incarnation, JsonObject, Picture, Publication, StagedWeights
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.choice import make_sender
from miles_async.weights.transports.object_store_rank import ObjectStoreSender
from tests.fakes.fake_fleet import FakeRouter
from tests.fakes.fake_sides import FakeTrainer, InProcess, publish
from tests.fakes.publishers import publisher_of
from tests.integration.megatron_scenario import Layout, make_backend
from tests.integration.served_models import served_spec
from tests.integration.streamed_request import StreamedRequest
from tests.integration.tiny_models import VOCAB
from tests.integration.toy_batches import ToySample, to_shards, toy_samples

CANARY = tuple(range(3, 35))
OPTIMIZER_STEPS = 2  # from one version to the next
BUCKET_BYTES = 50_000  # several of a tiny model
TRANSPORTS: dict[str, dict[str, object]] = {
    "distributed": {},
    "distributed, two senders": {"senders": 2},
    "disk": {"weight_transport": "disk"},
    "object_store": {"weight_transport": "object_store"},
    "disk, xor": {"weight_transport": "disk", "weight_delta": "xor"},
    "object_store, overwrite": {"weight_transport": "object_store", "weight_delta": "overwrite", "senders": 2},
}
Held = tuple[int, list[int]]
"""What publications could leave open: listening sockets of this process, file descriptors of each of the engines'."""
Corrupt = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]
"""Spoils tensors of a staged file in place, given all tensors of the version before."""


def listening_sockets() -> int:
    """Number of listening sockets of this process; process groups that are garbage have closed theirs."""
    gc.collect()
    return sum(c.status == psutil.CONN_LISTEN for c in psutil.Process().net_connections())


async def until_no_more(held: Callable[[], Held], most: Held) -> None:
    """Waits until nothing is held beyond ``most``: idle HTTP connections are closed after seconds, by either side."""
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            while exceeds(held(), most):  # noqa: ASYNC110  (the system tells nobody)
                await asyncio.sleep(0.1)
    assert not exceeds(held(), most), f"{held()} where at most {most} was expected"


def exceeds(now: Held, most: Held) -> bool:
    """Whether any number is above its like."""
    return now[0] > most[0] or any(a > b for a, b in zip(now[1], most[1], strict=True))


async def settled(held: Callable[[], Held]) -> Held:
    """Read what is held once it has been the same for half a second."""
    last, same = held(), 0
    while same < 5:
        await asyncio.sleep(0.1)
        now = held()
        last, same = now, same + 1 if now == last else 0
    return last


class Trainer:
    """One rank that trains ``model`` on random sequences."""

    def __init__(self, model: Path, draw: Callable[..., list[ToySample]] = toy_samples, **options: object) -> None:
        """``draw``: makes so many samples of a seed. ``options``: of ``make_backend``."""
        self.version = -1
        self._draw = draw
        self._backend = make_backend(0, 1, dist.HashStore(), model, Layout(), **options)

    def train(self) -> None:
        """On to the next version."""
        self.version += 1
        samples = [self._draw(8, seed=OPTIMIZER_STEPS * self.version + step) for step in range(OPTIMIZER_STEPS)]
        self._backend.train(to_shards(samples, dp_size=1, micro_batches=1)[0])

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._backend.export_weights()}

    def logprobs(self, tokens: Sequence[int], pictures: tuple[Picture, ...] = ()) -> list[float]:
        """Of tokens[1:]."""
        return self._backend.logprobs([list(tokens)], pictures=[pictures])[0]

    def save_hf(self, directory: Path) -> None:
        self._backend.save_hf(directory)

    def close(self) -> None:
        self._backend.close()


class HookedFleet(Fleet):
    """Calls ``before_pause`` once, right before engines are paused."""

    before_pause: Callable[[], Awaitable[None]] | None = None

    async def call(  # type: ignore[override]
        self, engines: Sequence[Incarnation], operation: Callable[..., object], *arguments: object, brief: bool = False
    ) -> Any:
        before = self.before_pause
        if operation is InferenceServer.pause and before is not None:
            self.before_pause = None
            await before()
        return await super().call(engines, operation, *arguments, brief=brief)


@dataclass(frozen=True)
class OneEngine:
    """A real SGLang server."""

    fleet: HookedFleet
    server: SGLangServer
    http: Http
    url: str


def published_spec(model: Path, folder: Path, engine_imports: Path, **more: Any) -> ServerSpec:
    """Specify a CPU engine that starts without weights and compares each published one. It logs to ``folder``."""
    return served_spec(model, folder / "logs", engine_imports, held_weights=True, dummy_weights=True, **more)


@asynccontextmanager
async def one_engine(spec: ServerSpec) -> AsyncIterator[OneEngine]:
    """Start a server of ``spec``, in a fleet of its own; stop it at the end."""
    registry, http = EngineRegistry(), Http()
    router, server = FakeRouter(registry), SGLangServer(http)
    launch = partial(ServerProcess, SGLANG, spec)
    group = EngineGroup(engines=1, ranks=spec.tensor_parallel_size, streams=True, launch=launch)
    supervisor = EngineSupervisor(registry, router, server, [group])
    try:
        await router.start()
        await supervisor.start()
        url = registry.engines["engine-0"].url
        assert url is not None
        yield OneEngine(HookedFleet(registry, supervisor, server, Traffic()), server, http, url)
    finally:
        await supervisor.stop()
        await http.close()


@dataclass(frozen=True)
class Publishing:
    """A publisher under test."""

    trainer: Trainer
    publisher: WeightPublisher

    async def next(self) -> Publication:
        """Train, and publish that."""
        return await publish(self.publisher, self.trainer.version + 1)


class _TrainerSide(FakeTrainer):
    """Trains before it stages; what it stages is spoiled by ``corrupt``."""

    def __init__(self, trainer: Trainer, senders: Sequence[WeightSender], corrupt: Corrupt | None) -> None:
        super().__init__([])
        self._trainer = trainer
        self._senders = senders
        self._corrupt = corrupt
        self._scores: tuple[float, ...] = ()  # of the version before
        self._before: dict[str, torch.Tensor] = {}  # weights of it

    async def copy_weights(self, version: int) -> None:
        self._before = self._trainer.weights()
        self._trainer.train()
        assert self._trainer.version == version
        weights = self._trainer.weights()
        for sender in self._senders:
            sender.copy(version, weights.items())

    async def stage_weights(self, version: int) -> StagedWeights:
        shares = [await asyncio.to_thread(sender.stage, version) for sender in self._senders]
        if self._corrupt is not None:
            for staged in shares:
                self._corrupt_files(staged, self._before)
        previous, self._scores = self._scores, tuple(self._trainer.logprobs(CANARY))
        return msgspec.structs.replace(
            united(shares),
            canary_tokens=CANARY,
            canary_logprobs=self._scores,
            previous_canary_logprobs=previous,
        )

    def _corrupt_files(self, staged: StagedWeights, before: dict[str, torch.Tensor]) -> None:
        """What every transport sends from then on; the manifest says what should have been sent."""
        assert self._corrupt is not None
        for path in Path(staged.directory).glob("*.safetensors"):
            tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
            self._corrupt(tensors, before)
            path.write_bytes(save(tensors))  # in place: senders have mapped the file

    def sender(self, index: int, *, repair: bool = False) -> Any:
        return _InThread(self._senders[index])


class _InThread(InProcess):
    async def call(self, method: Callable[..., object], *arguments: object) -> Any:
        return await asyncio.to_thread(getattr(self._half, method.__name__), *arguments)


@asynccontextmanager
async def publishing(
    trainer: Trainer,
    fleet: EngineFleet,
    directory: Path,
    *,
    corrupt: Corrupt | None = None,
    senders: int = 1,
    tolerance: float = 1e-3,
    engines_timeout: float = 1.0,
    **flags: Any,
) -> AsyncIterator[Publishing]:
    """With the transport that ``flags`` choose; everything that it opened is closed again.

    ``directory``: for staged weights. ``tolerance``: of the canary.
    """
    defaults = {"verify_weights": "full", "update_weight_buffer_size": BUCKET_BYTES, "weight_staging_dir": directory}
    arguments = WeightsArguments(**(defaults | flags))
    made = [make_sender(arguments, "cpu", "127.0.0.1", sender=sender, senders=senders) for sender in range(senders)]
    for sender in made:
        if isinstance(sender, ObjectStoreSender):
            sender._put = np.array  # there is no Ray
    side = _TrainerSide(trainer, made, corrupt)
    publisher = publisher_of(side, fleet, arguments, tolerance=tolerance, engines_timeout=engines_timeout)
    try:
        yield Publishing(trainer, publisher)
    finally:
        await publisher.close()
        for opened in made:
            opened.close()
        assert os.listdir(directory) == []


async def check_interrupted(
    trainer: Trainer, prompt: Sequence[int], request: StreamedRequest, mode: str, tolerance: float = 1e-4
) -> None:
    """Check the answer to ``request``, which was in flight when the trainer's version was published."""
    before, after = str(trainer.version - 1), str(trainer.version)
    reply = await (request.reply if mode == "abort" else request.stop_under(trainer.version))
    spans = reply["meta_info"]["weight_versions"]
    ends = [span["end"] for span in spans]
    assert [span["start"] for span in spans] == [0, *ends[:-1]]
    assert [span["version"] for span in spans] == ([before] if mode == "abort" else [before, after])
    assert len(reply["output_ids"]) == len(reply_logprobs(reply)) == ends[-1]
    if mode == "abort":
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    if mode == "retract":  # the cache is rebuilt: from the edge on it is all from the new weights
        trained = trainer.logprobs([*prompt, *reply["output_ids"]])[len(prompt) - 1 :]
        np.testing.assert_allclose(reply_logprobs(reply)[ends[0] :], trained[ends[0] :], atol=tolerance)


def reply_logprobs(reply: JsonObject) -> list[float]:
    """Of the output."""
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def random_sequences() -> list[list[int]]:
    """Prompts of several lengths, the same in every process."""
    draw = np.random.default_rng(7)
    return [draw.integers(3, VOCAB, length).tolist() for length in (2, 17, 64, 130)]
