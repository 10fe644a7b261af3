"""An engine whose loader discards every update after the first, in bf16 and at a learning rate of 1e-6, where log-probs
say nothing about it. Two real SGLang servers and Megatron, no Ray and no router.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from miles_async.arguments import WeightsArguments
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.weights.verify import canary_tolerance
from tests.fakes.fake_fleet import FakeRouter
from tests.integration.deaf_engine import DEAF
from tests.integration.publishing import Trainer, published_spec, publishing
from tests.integration.served_models import save_served

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

HEARING, DEAF_ONE = "hearing-0", "deaf-0"
TOLERANCE = canary_tolerance(WeightsArguments(), bf16=True, device="cpu")


@dataclass
class Pair:
    """A good engine and a deaf one."""

    fleet: Fleet
    registry: EngineRegistry
    trainer: Trainer
    staged: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("deaf")
    model = save_served("qwen3", folder / "model", seed=0, dtype="bfloat16")
    groups = []
    for name, extra in (("hearing", ()), ("deaf", (DEAF,))):
        spec = published_spec(model, folder, engine_imports, group=name, dtype="bfloat16", extra=extra)
        groups.append(EngineGroup(name=name, engines=1, streams=True, launch=partial(ServerProcess, SGLANG, spec)))
    registry, http = EngineRegistry(), Http()
    router = FakeRouter(registry)
    supervisor = EngineSupervisor(registry, router, SGLangServer(http), groups)
    await router.start()
    await supervisor.start()
    trainer = Trainer(model, bf16=True, lr=1e-6)
    yield Pair(Fleet(registry, supervisor, SGLangServer(http), Traffic()), registry, trainer, folder / "staged")
    trainer.close()
    await supervisor.stop()
    await http.close()


async def test_log_probs_do_not_tell_and_the_publication_says_so(pair: Pair) -> None:
    # covers: C8
    options: dict[str, object] = {"verify_weights": "canary", "tolerance": TOLERANCE}
    async with publishing(pair.trainer, pair.fleet, pair.staged, **options) as published:
        assert not (await published.next()).canary_undecided, "there is no version before"
        publication = await published.next()
    assert publication.engines == (HEARING, DEAF_ONE)
    assert publication.canary_undecided == (HEARING, DEAF_ONE)


async def test_it_is_fenced_at_the_first_update_that_it_discards(pair: Pair) -> None:
    # covers: C8
    async with publishing(pair.trainer, pair.fleet, pair.staged, tolerance=TOLERANCE) as published:
        publication = await published.next()
    assert (publication.engines, publication.fenced) == ((HEARING,), (DEAF_ONE,))
    assert publication.compared_tensors > 0
    assert publication.incomparable_tensors == 0
    record = pair.registry.engines[DEAF_ONE]
    assert record.state is EngineState.FENCED
    assert "weights differ: " in record.reason
