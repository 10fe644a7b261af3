"""Agents of LangChain, pydantic-ai and smolagents, unmodified, as ``--agent-command`` runs them; the model is scripted.

# covers: R2
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from miles_async.rollout.agent_command import CommandAgent
from miles_async.types import Prompt
from tests.fakes.keys import KEYS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CHAT, agent_of, says

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PACKAGES = (
    *("langchain==1.5.*", "langchain-openai==1.7.*", "langchain-anthropic==1.7.*"),
    *("pydantic-ai-slim[openai,anthropic]==2.68.*", "smolagents[openai]==1.26.*"),
)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "17*4"}}\n</tool_call>'
LAST_CALL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "68"}}\n</tool_call>'
CODE = 'Thought: I look it up.\n<code>\nfound = search("17*4")\nprint(found)\n</code>'
LAST_CODE = 'Thought: That is it.\n<code>\nfinal_answer("68")\n</code>'

BEGIN = """
import json, sys

protocol, stream, question = sys.argv[1], sys.argv[2] == "True", json.load(sys.stdin)["text"]


def search(query: str) -> str:
    \"\"\"Look it up.

    Args:
        query: What for.
    \"\"\"
    return f"result of {query}"

"""

LANGCHAIN = """
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

options = {"model": "policy", "streaming": stream}
if protocol == "messages":
    model = ChatAnthropic(max_tokens=400, **options)
else:
    model = ChatOpenAI(use_responses_api=protocol == "responses", **options)
agent = create_agent(model, tools=[search], system_prompt="Be brief.")
messages = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"]
print(json.dumps([messages[-1].text, None]))
"""

PYDANTIC_AI = """
import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
agent = Agent(models[protocol]("policy"), instructions="Be brief.", tools=[search])


async def main():
    if not stream:
        return (await agent.run(question)).output
    async with agent.run_stream(question) as result:
        return await result.get_output()


print(json.dumps([asyncio.run(main()), None]))
"""

SMOLAGENTS = """
import os

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = {"calls": ToolCallingAgent, "code": CodeAgent}[protocol]
agent = kind(tools=[tool(search)], model=model, stream_outputs=stream, verbosity_level=0)
print("\\n" + json.dumps([agent.run(question), None]))  # below what it shows
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the packages; AGENTS_PYTHON names one that is there already."""
    if (there := os.environ.get("AGENTS_PYTHON")) is not None:
        return there
    folder = tmp_path_factory.mktemp("agents")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = str(folder / "bin" / "python")
    subprocess.run([found, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=800)
    return found


async def answered(
    python: str, program: str, words: str, model: ScriptedModel, folder: Path
) -> tuple[object, int, int]:
    """(what the agent answered, turns, branches); trained is what the model said."""
    (folder / "agent.py").write_text(BEGIN + program)
    command = f"{python} {folder / 'agent.py'} {words}"
    agent = CommandAgent(command, log_path=folder / "agents.log", api_key=KEYS.sessions.agents)
    async with agent_of(model, timeout=600.0, max_response=5_000, max_total=100_000) as session:
        answer, _ = await agent(session.opened.base_url, Prompt(prompt_id="p", token_ids=(1,), text="17*4?"))
        sample = (await session.collect()).sample
    assert sample is not None
    trained = [branch.tokens[branch.loss_mask == 1].tolist() for branch in sample.branches]
    said = model.said if len(trained) > 1 else [[*chain.from_iterable(model.said)]]
    assert sorted(trained) == sorted(said)
    return answer, sample.metadata["turns"], len(sample.branches)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize("program", [LANGCHAIN, PYDANTIC_AI], ids=["langchain", "pydantic_ai"])
async def test_a_conversation_is_one_branch(
    program: str, protocol: str, stream: bool, python: str, tmp_path: Path
) -> None:
    model = ScriptedModel(says(CALL, CALL, "68"))
    assert await answered(python, program, f"{protocol} {stream}", model, tmp_path) == ("68", 3, 1)
    assert CHAT.decode_all(model.requests[-1]).count("result of 17*4") == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "script"), [("calls", (CALL, LAST_CALL)), ("code", (CODE, LAST_CODE))])
async def test_smolagents(kind: str, script: tuple[str, ...], stream: bool, python: str, tmp_path: Path) -> None:
    """It writes earlier calls as text, so that each turn is a branch."""
    model = ScriptedModel(says(*script))
    assert await answered(python, SMOLAGENTS, f"{kind} {stream}", model, tmp_path) == ("68", 2, 2)
    assert "result of 17*4" in CHAT.decode_all(model.requests[-1])
