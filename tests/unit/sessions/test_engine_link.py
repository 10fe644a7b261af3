"""Requests of the session server reach the rollout process's client as they are, and generations come back so."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from miles_async.sessions.engine_link import EngineLink, serve_engines
from miles_async.types import GenerateRequest
from tests.fakes.scripted_model import ScriptedModel


async def test_arrays_cross_the_link_as_they_are(tmp_path: Path) -> None:  # covers: C12
    model = ScriptedModel(lambda call, input_ids: [7, 8, 9], version=3)
    close = await serve_engines(model, lambda alive: None, tmp_path / "socket")
    link = EngineLink(tmp_path / "socket")
    request = GenerateRequest(
        input_ids=np.array([5, 6], np.int32), sampling={"max_new_tokens": 2, "temperature": 1.0}, routing_key="1-0"
    )
    try:
        generation = await link.generate(request)
    finally:
        await link.close()
        await close()
    assert (model.requests, model.sampling, model.routing_keys) == ([[5, 6]], [dict(request.sampling)], ["1-0"])
    expected = await ScriptedModel(lambda call, input_ids: [7, 8, 9], version=3).generate(request)
    assert (generation.output_ids.dtype, generation.output_ids.tolist()) == (np.int32, expected.output_ids.tolist())
    assert generation.logprobs.tobytes() == expected.logprobs.tobytes()
    assert generation.spans == expected.spans
