"""Weights reach an engine that keeps them in another form: SGLang restores its layers before every update and
post-processes them after it, whatever the transport. One server that rounds linear layers to int8
(``rounded_engine.py``), no Ray and no router.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.types import TensorShare
from tests.fakes.fake_fleet import FakeRouter
from tests.integration.publishing import CANARY, TRANSPORTS, Trainer, published_spec, publishing
from tests.integration.served_models import reference_logprobs, save_served

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

ENGINE = "engine-0"
LINEAR = "_proj."  # in the names of all linear layers, and of nothing else
LINEAR_LAYERS = 14  # seven in each of two layers
AGREES = 1e-4  # log-probs of the same weights
DIFFERS = 5e-3  # and of those before rounding: 0.015 and 0.02 here
TOLERANCE = 0.1  # of the canary: the trainer does not round
SECONDS = 30.0


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Each row in steps of a 127th of its largest element, as the engine has it."""
    step = weight.abs().max(dim=1, keepdim=True).values / 127
    return torch.round(weight / step) * step


def read(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def write(directory: Path, weights: dict[str, torch.Tensor], *, like: Path) -> Path:
    """A model with the configuration of ``like``."""
    directory.mkdir()
    shutil.copy(like / "config.json", directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@cache
def rounded_copy(model: Path) -> Path:
    weights = {name: rounded(weight) if LINEAR in name else weight for name, weight in read(model).items()}
    return write(model.with_name(f"{model.name}-rounded"), weights, like=model)


@dataclass
class Server:
    """The engine under test, and two models whose weights it is sent."""

    fleet: Fleet
    registry: EngineRegistry
    api: SGLangServer
    models: tuple[Path, Path]
    trainer: Trainer  # of the first
    directory: Path

    @property
    def url(self) -> str:
        url = self.registry.engines[ENGINE].url
        assert url is not None
        return url

    async def expect_rounded(self, model: Path) -> None:
        """Its log-probs are those of ``model`` after rounding, clearly not those before."""
        found = (await self.api.score(self.url, CANARY, SECONDS)).logprobs
        np.testing.assert_allclose(found, reference_logprobs(rounded_copy(model), CANARY), rtol=0, atol=AGREES)
        assert np.abs(np.array(found) - reference_logprobs(model, CANARY)).max() > DIFFERS

    async def load(self, model: Path) -> None:
        await self.api.load_files(self.url, str(model), 0, SECONDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("quantized")
    models = (save_served("qwen3", folder / "m0", seed=0), save_served("qwen3", folder / "m1", seed=1))
    spec = published_spec(models[0], folder, engine_imports, extra=("--quantization=rounded",))
    registry, http = EngineRegistry(), Http()
    router = FakeRouter(registry)
    supervisor = EngineSupervisor(
        registry,
        router,
        SGLangServer(http),
        [EngineGroup(engines=1, streams=True, launch=partial(ServerProcess, SGLANG, spec))],
    )
    await router.start()
    await supervisor.start()
    fleet, trainer = Fleet(registry, supervisor, SGLangServer(http), Traffic()), Trainer(models[0])
    yield Server(fleet, registry, SGLangServer(http), models, trainer, folder)
    trainer.close()
    await supervisor.stop()
    await http.close()


async def test_the_engine_rounds_what_it_is_told_to_load(server: Server) -> None:
    for model in reversed(server.models):
        await server.load(model)
        await server.expect_rounded(model)


async def test_what_an_update_leaves_out_stays_as_it_was(server: Server) -> None:
    """As when a delta changes a few buckets: all layers are restored and post-processed, loaded or not."""
    # covers: M16
    first, second = server.models
    part = {name: weight for name, weight in read(second).items() if ".layers.1." in name}
    both = write(server.directory / "both", read(first) | part, like=first)
    await server.load(first)
    await server.load(write(server.directory / "part", part, like=first))
    await server.expect_rounded(both)
    await server.api.begin_update(server.url, SECONDS)
    await server.api.end_update(server.url, SECONDS)
    await server.expect_rounded(both)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_engine_rounds_what_is_published(server: Server, transport: str, tmp_path: Path) -> None:
    # covers: C8, M16
    options = {"tolerance": TOLERANCE, "verify_weights": "full"} | TRANSPORTS[transport]
    async with publishing(server.trainer, server.fleet, server.directory / "staged", **options) as published:
        for version in ("first", "second"):  # the second may come as a delta
            publication = await published.next()
            assert 0 < publication.canary_difference < TOLERANCE
            assert publication.compared_tensors > 0
            assert publication.incomparable_tensors == LINEAR_LAYERS
            trained = write(tmp_path / version, server.trainer.weights(), like=server.models[0])
            await server.expect_rounded(trained)


async def test_what_is_rounded_is_reported_as_held_in_another_form(server: Server) -> None:
    report = await server.api.report_weights(server.url, TensorShare(), SECONDS)
    held = await server.api.held_weights(server.url, report, SECONDS)
    assert set(held.other_form) == {name for name in held.parts if LINEAR in name} != set()
    assert held.unfilled == {}
