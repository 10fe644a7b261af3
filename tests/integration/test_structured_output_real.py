"""Structured output on a real engine: what the openai client gets, and which log-probs and loss its tokens have.

# covers: M13, C12
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from miles_async.engines.client import RouterClient
from tests.fakes.chat_formats import TOOLS, chat_format
from tests.fakes.session_agents import QUESTION, agent_of
from tests.integration.grammar_engine import grammar_engine
from tests.integration.served_models import reference_logprobs

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "digit": {"enum": [1, 2, 3]}},
    "required": ["sure", "digit"],
    "additionalProperties": False,
}


@dataclass
class Served:
    """An engine with random weights, behind the client that runs use."""

    client: RouterClient
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Served]:
    model, tokenizer = tmp_path_factory.mktemp("structured") / "model", chat_format("qwen3").tokenizer
    async with grammar_engine(model, tokenizer, engine_imports, request_timeout=120.0) as (client, _):
        yield Served(client, model)


async def test_answers_have_the_schema_and_choices_alone_carry_loss(served: Served) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    async with agent_of(served.client, max_response=2000, max_total=4000) as agent:
        options = {"enable_thinking": False}
        answer = await agent.chat(
            QUESTION, response_format=response_format, extra_body={"chat_template_kwargs": options}
        )
        sample = (await agent.collect()).sample
    assert answer.choices[0].finish_reason == "stop"
    content = json.loads(answer.choices[0].message.content)
    assert content.keys() == {"sure", "digit"}
    assert content["digit"] in (1, 2, 3)

    said = slice(sample.prompt_length, None)
    of_policy = reference_logprobs(served.model, sample.tokens.tolist())[sample.prompt_length - 1 :]
    chosen = sample.loss_mask[said] == 1
    assert 0 < chosen.sum() < len(chosen)
    assert of_policy[~chosen].max() < -0.1  # the policy alone would rarely have said what the grammar forced
    found = sample.rollout_logprobs[said]
    assert (found[chosen] >= of_policy[chosen] - 1e-4).all()  # restricted to what the grammar allows
    assert (found[chosen] - of_policy[chosen]).max() > 0.1
    assert np.isin(sample.weight_versions[said], (-1, 1)).all()


async def test_a_tool_that_must_be_called_is_called(served: Served) -> None:
    parameters = {"type": "object", "properties": {"limit": {"enum": [1, 2]}}, "required": ["limit"]}
    tool = {
        "type": "function",
        "function": {"name": "search", "parameters": {**parameters, "additionalProperties": False}},
    }
    async with agent_of(served.client, max_response=2000, max_total=4000) as agent:
        for offered, choice in (
            ([tool], "required"),
            ([tool, *TOOLS[1:]], {"type": "function", "function": {"name": "search"}}),
        ):
            async with asyncio.timeout(120):
                answer = await agent.chat(
                    QUESTION, tools=offered, tool_choice=choice, parallel_tool_calls=False,
                    extra_body={"chat_template_kwargs": {"enable_thinking": False}},
                )  # fmt: skip
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "search"
            assert json.loads(call.function.arguments)["limit"] in (1, 2)
            assert answer.choices[0].finish_reason == "tool_calls"
