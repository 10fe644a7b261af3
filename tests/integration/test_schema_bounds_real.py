"""Schemas of agents on a real engine with a vocabulary of 150,000: evil ones never reach it, and those just below the
bounds take a bounded time, in which it answers other requests.

# covers: M13
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest
import pytest_asyncio

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.engines.kind import ServerSpec
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.traffic import Traffic
from miles_async.types import GenerateRequest, JsonObject
from tests.benchmarks import vocabulary
from tests.fakes.session_agents import QUESTION, agent_of
from tests.integration.tiny_models import save_tiny

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

COMPILED_SECONDS = 150.0  # SGLang gives up on a grammar after 50 s of its scheduler's time
OTHERS_SECONDS = 15.0  # after which an engine that generates nothing counts as stopped


def pattern(text: str) -> JsonObject:
    return {"type": "string", "pattern": f"^{text}$"}


def nested(levels: int) -> JsonObject:
    schema: JsonObject = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 9_999, "maxItems": 10_000}
    return schema


def properties(count: int, **more: int) -> JsonObject:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}, **more}


REFUSED = {
    "nested repeats": pattern("((a{1,500}){1,500}){1,500}"),
    "repeats that may end anywhere": pattern("([a-z]{1,10} ?){1,10}"),
    "unbounded repeats of unbounded repeats": pattern("([a-z]* )*" * 100),
    "depth": nested(100),
    "a large enum": {"enum": [f"{n:05}" for n in range(20_000)]},
    "counts of named properties": properties(256, minProperties=128, maxProperties=200),
    "many long lengths": {"anyOf": [{"type": "string", "maxLength": 300 + n} for n in range(300)]},
}
ALLOWED = {
    "ways": pattern("([a-z]{1,31}){1,2}"),
    "unbounded repeats": pattern("[a-z]+" * 64),
    "nested unbounded repeats": pattern("([a-z]* )*" * 32),
    "lengths": {"anyOf": [{"type": "string", "minLength": n, "maxLength": 250 - n} for n in range(1, 5)]},
    "depth": nested(60),
    "a large enum": {"enum": [f"{n:05}" for n in range(13_000)]},
    "counts of named properties": properties(32, minProperties=16, maxProperties=24),
    "named properties": properties(256),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[RouterClient]:
    """Of an engine with random weights."""
    folder = tmp_path_factory.mktemp("bounds")
    tokenizer = vocabulary.tokenizer()
    model = save_tiny("qwen3-tied", folder / "model", vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(model)
    spec = ServerSpec(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        start_timeout=200,
        log_dir=str(folder),
        grammars=True,
        fork_server=engine_imports,
    )
    server, http = ServerProcess(SGLANG, spec, 0, 0), Http()
    url = await server.start()
    body = {"new_version": "1", "abort_all_requests": False}
    async with http.session.post(f"{url}/update_weight_version", json=body) as response:
        assert response.status == 200
    registry = EngineRegistry(version=1)
    registry.engines["engine-0"] = EngineRecord(engine_id="engine-0", state=EngineState.SERVING, url=url, verified=True)
    registry.router_up = True
    registry.notify()
    try:
        yield RouterClient(
            SGLangServer(http),
            http, registry, Traffic(), router_url=lambda: url,
            request_timeout=COMPILED_SECONDS, retries=0, gate_timeout=20.0,
        )  # fmt: skip
    finally:
        await http.close()
        await server.stop()


async def longest_answer(client: RouterClient) -> float:
    """Ask for few tokens again and again, until cancelled. Returns the longest time that one answer took."""
    longest, prompt = 0.0, np.array([5, 6, 7], np.int32)
    while True:
        started = time.monotonic()
        asked = GenerateRequest(input_ids=prompt, sampling={"max_new_tokens": 4}, routing_key="plain")
        try:
            await client.generate(asked)
        except asyncio.CancelledError:
            return max(longest, time.monotonic() - started)
        longest = max(longest, time.monotonic() - started)


@pytest.mark.parametrize("case", REFUSED)
async def test_an_evil_schema_is_refused_and_never_reaches_the_engine(client: RouterClient, case: str) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": REFUSED[case]}}
    async with agent_of(client, max_total=4000) as agent:
        with pytest.raises(openai.BadRequestError):
            await agent.chat(QUESTION, response_format=asked)
    assert client.in_flight == 0


@pytest.mark.parametrize("case", ALLOWED)
async def test_an_engine_answers_others_while_it_works_on_an_allowed_schema(client: RouterClient, case: str) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": ALLOWED[case]}}
    others = asyncio.ensure_future(longest_answer(client))
    async with agent_of(client, max_response=64, max_total=4000, timeout=COMPILED_SECONDS) as agent:
        answer = await agent.chat(QUESTION, response_format=asked, timeout=COMPILED_SECONDS)
    others.cancel()
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert await others < OTHERS_SECONDS
