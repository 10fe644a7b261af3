"""Harnesses that people use, unmodified: their own loops over turns, tools and protocols."""

from __future__ import annotations

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from anthropic import beta_async_tool

from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CHAT, agent_of, says

CALLS = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {"query": "17*4"}}\n</tool_call>'
QUIET = RunConfig(tracing_disabled=True)


@pytest.mark.parametrize("model_class", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
async def test_openai_agents(model_class: type[Model], stream: bool, stateful: bool) -> None:
    if stateful and model_class is OpenAIChatCompletionsModel:
        return  # that protocol has no state

    @function_tool
    def search(query: str) -> str:
        """Look it up."""
        return f"result of {query}"

    model = ScriptedModel(says(CALLS, CALLS, "68"))
    async with agent_of(model) as session:
        agent = Agent(
            name="solver",
            instructions="Be brief.",
            tools=[search],
            model=model_class("policy", session.client),  # type: ignore[call-arg]
            model_settings=ModelSettings(temperature=0.1, max_tokens=400),
        )
        options = {"run_config": QUIET, "auto_previous_response_id": stateful}
        if stream:
            result = Runner.run_streamed(agent, "17*4?", **options)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "17*4?", **options)
        sample = await session.sample()
    assert result.final_output == "68"
    assert (sample.metadata["turns"], len(sample.branches)) == (3, 1)
    text = CHAT.decode_all(model.requests[-1])
    assert text.count("result of 17*4") == 2
    assert text.count("<|im_start|>system\nBe brief.") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_of_anthropic(stream: bool) -> None:
    @beta_async_tool
    async def search(query: str) -> str:
        """Look it up."""
        return f"result of {query}"

    model = ScriptedModel(says(CALLS, CALLS, "68"))
    async with agent_of(model) as session:
        runner = session.anthropic.beta.messages.tool_runner(
            model="policy",
            max_tokens=400,
            tools=[search],
            messages=[{"role": "user", "content": "17*4?"}],
            system="Be brief.",
            stream=stream,
        )
        final = await runner.until_done()
        sample = await session.sample()
    assert final.content[-1].text == "68"
    assert (sample.metadata["turns"], len(sample.branches)) == (3, 1)
    assert CHAT.decode_all(model.requests[-1]).count("result of 17*4") == 2
