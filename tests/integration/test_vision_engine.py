"""A vision-language model that Megatron trains is published whole to a real SGLang server; both read images alike."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from miles_async.engines.answer_guard import check_answer
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.kind import ServerSpec
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.staleness.versions import token_versions
from miles_async.types import GenerateRequest, Generation
from tests.fakes.fake_fleet import FakeRouter
from tests.integration.publishing import Trainer, publishing
from tests.integration.tiny_models import VOCAB
from tests.integration.vision_models import IMAGE, VIDEO, cases, save_served_vision, vision_samples

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

SAMPLES = 3  # of each prompt
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "stop_token_ids": [IMAGE, VIDEO]}


async def test_engines_read_images_as_the_trainer_does(tmp_path: Path, engine_imports: Path) -> None:
    # covers: C8, M16
    spec = ServerSpec(
        model_path=str(save_served_vision(tmp_path / "model")),
        device="cpu",
        dtype="float32",
        start_timeout=200,
        log_dir=str(tmp_path / "logs"),
        held_weights=True,
        dummy_weights=True,
        fork_server=engine_imports,
    )
    registry, http = EngineRegistry(), Http()
    router, server = FakeRouter(registry), SGLangServer(http)
    group = EngineGroup(engines=1, ranks=1, streams=True, launch=partial(ServerProcess, SGLANG, spec))
    supervisor = EngineSupervisor(registry, router, server, [group])
    await router.start()
    await supervisor.start()
    trainer = Trainer(Path(spec.model_path), vision_samples)

    async def answer(request: GenerateRequest, sample: int, version: int) -> Generation:
        body = server.encode(request, request_id=f"v{version}-{sample}", version=version, experts=False)
        url = registry.engines["engine-0"].url
        headers = {"Content-Type": "application/json"}
        async with http.session.post(f"{url}/generate", data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            reply = await response.read()
        versions = partial(token_versions, dispatch_version=version, tokens_in_flight=1)
        found = server.decode(reply, response.content_type, str(url), versions)
        check_answer(found, request, VOCAB, str(url))
        return found

    fleet = Fleet(registry, supervisor, server, Traffic())
    try:
        async with publishing(trainer, fleet, tmp_path / "staged", tolerance=1e-4) as published:
            for version in range(2):
                publication = await published.next()
                assert publication.engines == ("engine-0",)
                assert (publication.compared_tensors, publication.incomparable_tensors) == (len(trainer.weights()), 0)
                requests = [
                    GenerateRequest(
                        input_ids=np.array(tokens, np.int32),
                        sampling=SAMPLING,
                        routing_key="",
                        pictures=pictures,
                        image_token=IMAGE,
                    )
                    for tokens, pictures in cases()[2:] * SAMPLES  # prompts don't end at a placeholder
                ]
                calls = [answer(request, sample, version) for sample, request in enumerate(requests)]
                for request, found in zip(requests, await asyncio.gather(*calls), strict=True):
                    sequence = [*request.input_ids.tolist(), *found.output_ids.tolist()]
                    trained = trainer.logprobs(sequence, request.pictures)[len(request.input_ids) - 1 :]
                    np.testing.assert_allclose(found.logprobs, trained, atol=1e-4)
    finally:
        trainer.close()
        await supervisor.stop()
        await http.close()
