"""What the trainer exports of every family is what SGLang's loader of that family holds, element by element: no tensor
more or less, and no parameter that a publication leaves as it was. Requests that publications meet go on. A real server
for each, and Megatron.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from miles_async.arguments import WeightsArguments
from miles_async.weights.verify import canary_tolerance
from tests.integration.family_table import SERVED, SERVED_AT_NIGHT, SERVED_IN_BF16
from tests.integration.publishing import (
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
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

CASES = [
    *((*case, "float32") for case in SERVED),
    *(pytest.param(*case, "float32", marks=pytest.mark.long) for case in SERVED_AT_NIGHT),
    *(pytest.param(*case, "bfloat16", marks=pytest.mark.long) for case in SERVED_IN_BF16),
]
# Gemma: two norms of each of two layers, and the last one. Nemotron-H: decays of each layer of Mamba-2.
IN_OTHER_FORM = {"gemma": 5, "nemotron-h": 2, "nemotron-h-moe": 1}


PROMPT, LONG = (5, 6, 7, 8), 500  # tokens: many more than come before a pause


@pytest.mark.parametrize(("family", "ranks", "dtype"), CASES)
async def test_engines_hold_all_that_is_exported_and_nothing_else(
    family: str, ranks: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_imports: Path
) -> None:
    # covers: C8, M16
    if ranks > 1:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang asks for that on one NUMA node
    model, bf16 = save_served(family, tmp_path / "model", seed=0, dtype=dtype), dtype == "bfloat16"
    tolerance = canary_tolerance(WeightsArguments(), bf16=True, device="cpu") if bf16 else 1e-4  # on average
    most = 4 * tolerance if bf16 else tolerance
    spec = published_spec(model, tmp_path, engine_imports, dtype=dtype, tensor_parallel_size=ranks)
    async with one_engine(spec) as engine:
        with closing(Trainer(model, bf16=bf16)) as trainer:

            def stream(tokens: int, version: int) -> StreamedRequest:
                sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
                body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
                body["extra_key"] = f"v{version}"  # as the client does
                return StreamedRequest(engine.http, engine.url, body)

            for mode in ("abort", "retract", "in_place"):
                async with publishing(
                    trainer, engine.fleet, tmp_path / "staged", tolerance=tolerance, pause_generation_mode=mode
                ) as published:
                    in_flight: list[StreamedRequest] = []

                    async def start_request() -> None:
                        in_flight.append(stream(LONG, trainer.version - 1))  # noqa: B023
                        await in_flight[0].goes_on()  # noqa: B023

                    if trainer.version >= 0:
                        engine.fleet.before_pause = start_request
                    publication = await published.next()
                    assert publication.engines == ("engine-0",)
                    assert publication.incomparable_tensors == IN_OTHER_FORM.get(family, 0)
                    assert publication.compared_tensors == len(trainer.weights()) - publication.incomparable_tensors
                    for request in in_flight:
                        await check_interrupted(trainer, PROMPT, request, mode, most)
            reply = await stream(16, trainer.version).reply  # nothing is left of the prompt as older weights read it
            trained = trainer.logprobs([*PROMPT, *reply["output_ids"]])[len(PROMPT) - 1 :]
            np.testing.assert_allclose(reply_logprobs(reply), trained, atol=most)
