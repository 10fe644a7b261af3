"""Schemas of agents on a real engine with a vocabulary of 150,000: evil ones never reach it, and those just below the
bounds take a bounded time, in which it answers other requests.

# covers: M13
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest
import pytest_asyncio

from miles_async.engines.client import RouterClient
from miles_async.types import GenerateRequest, JsonObject
from tests.benchmarks import vocabulary
from tests.fakes.session_agents import QUESTION, agent_of
from tests.integration.grammar_engine import grammar_engine

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

COMPILED_SECONDS = 150.0  # SGLang gives up on a grammar after 50 s of its scheduler's time
BY_DAY = ("depth", "named properties")  # the quickest of ALLOWED
OTHERS_SECONDS = 30.0  # of its processors, which the threads that compile take most of where there are two


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
async def engine(
    tmp_path_factory: pytest.TempPathFactory, engine_imports: Path
) -> AsyncIterator[tuple[RouterClient, psutil.Process]]:
    """The client and the scheduler of an engine with random weights."""
    model, tokenizer = tmp_path_factory.mktemp("bounds") / "model", vocabulary.tokenizer()
    async with grammar_engine(model, tokenizer, engine_imports, request_timeout=COMPILED_SECONDS) as engine:
        yield engine


async def longest_answer(client: RouterClient, scheduler: psutil.Process) -> float:
    """Ask for few tokens again and again, until cancelled. Returns the most seconds of its processor, which a machine
    with other work to do takes longer for, that the scheduler needed for one answer.
    """

    def spent() -> float:
        times = scheduler.cpu_times()
        return times.user + times.system

    longest, prompt = 0.0, np.array([5, 6, 7], np.int32)
    while True:
        started = spent()
        asked = GenerateRequest(input_ids=prompt, sampling={"max_new_tokens": 4}, routing_key="plain")
        try:
            await client.generate(asked)
        except asyncio.CancelledError:
            return max(longest, spent() - started)
        longest = max(longest, spent() - started)


@pytest.mark.parametrize("case", REFUSED)
async def test_an_evil_schema_is_refused_and_never_reaches_the_engine(
    engine: tuple[RouterClient, psutil.Process], case: str
) -> None:
    client, _ = engine
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": REFUSED[case]}}
    async with agent_of(client, max_total=4000) as agent:
        with pytest.raises(openai.BadRequestError):
            await agent.chat(QUESTION, response_format=asked)
    assert client.in_flight == 0


@pytest.mark.parametrize(
    "case", [case if case in BY_DAY else pytest.param(case, marks=pytest.mark.long) for case in ALLOWED]
)
async def test_an_engine_answers_others_while_it_works_on_an_allowed_schema(
    engine: tuple[RouterClient, psutil.Process], case: str
) -> None:
    client, scheduler = engine
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": ALLOWED[case]}}
    others = asyncio.ensure_future(longest_answer(client, scheduler))
    async with agent_of(client, max_response=64, max_total=4000, timeout=COMPILED_SECONDS) as agent:
        answer = await agent.chat(QUESTION, response_format=asked, timeout=COMPILED_SECONDS)
    others.cancel()
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert await others < OTHERS_SECONDS
