"""An engine with data-parallel attention, whose ranks each have requests of their own: a publication reaches all of
them at once, in every pause mode, is compared on each, and what they generate is what was trained.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from miles_async.types import TensorShare
from tests.integration.publishing import (
    TRANSPORTS,
    Trainer,
    check_interrupted,
    one_engine,
    published_spec,
    publishing,
    reply_logprobs,
)
from tests.integration.served_models import save_served
from tests.integration.streamed_request import StreamedRequest

pytestmark = [
    pytest.mark.long,
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

GROUPS, LONG = 2, 400
PROMPTS = ((5, 6, 7, 8), (5, 6, 7, 9, 10, 11, 12), (13, 14))
FLAGS = ("--attn-dp-size=2", "--ep-size=2", "--moe-dense-tp-size=1", "--enable-dp-lm-head")  # as in presets


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe"])
async def test_all_groups_of_an_engine_get_every_publication(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_imports: Path
) -> None:
    # covers: C8, M11, A2
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang asks for that on one NUMA node
    model = save_served(family, tmp_path / "model", seed=0)
    spec = published_spec(model, tmp_path, engine_imports, tensor_parallel_size=GROUPS, extra=FLAGS)
    with closing(Trainer(model)) as trainer:
        async with one_engine(spec) as engine:

            def request(prompt: tuple[int, ...], tokens: int, version: int) -> StreamedRequest:
                sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
                body["extra_key"] = f"v{version}"  # as the client does
                return StreamedRequest(engine.http, engine.url, body)

            for mode, transport in (("retract", "distributed"), ("in_place", "disk"), ("abort", "object_store")):
                in_flight: list[StreamedRequest] = []

                async def start(in_flight: list[StreamedRequest] = in_flight) -> None:
                    in_flight += [request(prompt, LONG, trainer.version - 1) for prompt in PROMPTS]
                    await asyncio.gather(*(each.goes_on() for each in in_flight))

                flags = {"pause_generation_mode": mode, **TRANSPORTS[transport]}
                async with publishing(trainer, engine.fleet, tmp_path / mode, **flags) as published:
                    await published.next()
                    engine.fleet.before_pause = start
                    publication = await published.next()
                assert publication.compared_tensors > 0
                assert publication.canary_difference < 1e-4
                report = await engine.server.report_weights(engine.url, TensorShare(), 60.0)
                assert len(report.split()) == GROUPS  # of each rank once, not from each group
                for prompt, each in zip(PROMPTS, in_flight, strict=True):
                    await check_interrupted(trainer, prompt, each, mode)
                replies = [await each.reply for each in in_flight]
                assert {reply["meta_info"]["dp_rank"] for reply in replies} == set(range(GROUPS))
                later = [request(prompt, 8 + len(prompt), trainer.version) for prompt in PROMPTS]
                for prompt, reply in zip(PROMPTS, [await each.reply for each in later], strict=True):
                    assert {span["version"] for span in reply["meta_info"]["weight_versions"]} == {str(trainer.version)}
                    trained = trainer.logprobs([*prompt, *reply["output_ids"]])[len(prompt) - 1 :]
                    np.testing.assert_allclose(reply_logprobs(reply), trained, atol=1e-4)
