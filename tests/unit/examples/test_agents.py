"""The multi-turn examples without engines: their environments, their agent and their argument files.

# covers: R12, M20
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.blackbox_agent.agent import answer as solved
from examples.calculator_tool.calculator import calculate
from examples.calculator_tool.environment import CalculatorEnvironment
from examples.calculator_tool.prepare import main as prepare_calculator
from examples.calculator_tool.prepare import questions
from examples.quickstart.tokenizer import MODEL_MAX_LENGTH, VOCABULARY
from examples.search_agent.environment import Retrieval, SearchEnvironment
from examples.search_agent.prepare import corpus_and_questions
from examples.search_agent.retrieval_server import CORPUS, Index, application
from examples.tool_model.calls import parse_calls
from examples.tool_model.dialogues import TASKS, Dialogue, product_question
from miles_async.arguments.parser import parse_arguments
from miles_async.types import Prompt
from tests.fakes.environment_servers import serving
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import QUESTION, agent_of, says
from tests.fakes.turns import answer, calling

ROOT = Path(__file__).parents[3]


# --------------------------------------------------------------------------------------------------- calculator
@pytest.mark.parametrize(
    ("expression", "value"), [("17*23", "391"), ("12 + 30", "42"), ("3-5", "-2"), ("import os", "error"), ("", "error")]
)
def test_the_calculator_works_out_expressions_and_nothing_else(expression: str, value: str) -> None:
    assert calculate(expression) == value


async def test_the_calculator_answers_calls_and_pays_for_right_answers_that_ended() -> None:
    environment = CalculatorEnvironment(Prompt(prompt_id="p", token_ids=(1,), text="17*23=?", label="391"))
    said, (call,) = parse_calls("So: <call>17*23</call>", environment.tools())
    assert (said, call) == ("So: ", ("calculator", {"expression": "17*23"}))
    observed = await environment.step(calling(call))
    assert [message["content"] for message in observed.messages] == ["391"]
    assert not observed.done
    assert observed.metrics == {"tool_calls": 1}
    right = await environment.step(answer("391"))
    assert (right.done, right.reward) == (True, 1.0)
    for wrong in (answer("391", finish_reason="length"), answer("392")):
        assert (await environment.step(wrong)).reward == 0.0


@pytest.mark.parametrize("arguments", [{"sum": "1"}, "17*23", [1]])
async def test_calls_that_a_model_wrote_wrongly_are_answered(
    arguments: object, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns from that; an exception would cost the attempt."""
    monkeypatch.setenv("SEARCH_ENDPOINTS", server)
    prompt = Prompt(prompt_id="p", token_ids=(1,), text="17*23=?", label="391")
    for environment, told in ((CalculatorEnvironment(prompt), "error"), (SearchEnvironment(prompt), "nothing found")):
        (tool,) = environment.tools()
        observed = await environment.step(calling((tool["function"]["name"], arguments)))
        assert [message["content"] for message in observed.messages] == [told]
    call = {"name": "calculator", "arguments": arguments}
    async with agent_of(ScriptedModel(says(f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "391"))) as agent:
        assert await solved(agent.client, [QUESTION]) == 2


def test_every_question_of_the_calculator_is_there_once(tmp_path: Path) -> None:
    assert len({example.prompt for example in questions()}) == 90 * 90
    assert prepare_calculator(["--output", str(tmp_path)]) == 0
    (row, *_) = (tmp_path / "test.jsonl").read_text().splitlines()
    a, b = json.loads(row)["prompt"][0]["content"].removesuffix("=?").split("*")
    assert json.loads(row)["label"] == str(int(a) * int(b))
    assert product_question(17, 23) == "17*23=?"


# ------------------------------------------------------------------------------------------------------- search
@pytest.fixture
async def server() -> AsyncIterator[str]:
    async with serving(application()) as url:
        yield url


async def test_two_searches_lead_to_every_answer(server: str) -> None:
    documents, examples = corpus_and_questions()
    assert [json.loads(line) for line in CORPUS.read_text().splitlines()] == documents  # what is shipped
    index = Index(documents)
    for example in examples:
        land = example.prompt.removeprefix("who leads ").removesuffix("?")
        (found,) = index.search(land, 1)
        (leads,) = index.search(found["text"].split()[-1], 1)
        assert leads["text"].split()[-1] == example.label
    retrieval = Retrieval([server])
    assert (await retrieval.search(land)).startswith(f"{land} is ruled from")
    assert await retrieval.search("zzz") == "nothing found"


async def test_searches_go_round_the_servers_and_past_those_that_fail(server: str) -> None:
    dead = "http://127.0.0.1:9"
    retrieval = Retrieval([dead, server])
    _, examples = corpus_and_questions()
    land = examples[0].prompt.removeprefix("who leads ").removesuffix("?")
    for _ in range(4):
        assert (await retrieval.search(land)).startswith(land)
    with pytest.raises(ConnectionError, match="no retrieval server answers"):
        await Retrieval([dead]).search(land)
    with pytest.raises(ValueError, match="SEARCH_ENDPOINTS"):
        Retrieval([])


# -------------------------------------------------------------------------------------------------------- model
def test_dialogues_are_what_the_chat_template_writes() -> None:
    from examples.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    for seed in range(20):
        random_ = random.Random(seed)
        dialogue: Dialogue = TASKS[seed % 2](random_, seed % 3 > 0)
        ids, by_model = dialogue.tokens()
        messages = [{"role": role, "content": content} for role, content in dialogue.messages]
        assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
        assert len(ids) <= MODEL_MAX_LENGTH
        assert any(by_model)


def test_turns_of_a_dialogue_are_what_the_model_says_after_what_it_sees() -> None:
    dialogue = TASKS[1](random.Random(0), True)
    ids, _ = dialogue.tokens()
    said_by_model = [content for role, content in dialogue.messages if role == "assistant"]
    turns = dialogue.turns()
    assert [decoded(said) for _, said in turns] == [f"{content}<eos>" for content in said_by_model]
    assert all(ids[: len(before) + len(said)] == before + said for before, said in turns)


def decoded(ids: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids)


def test_shipped_model_uses_tools_in_some_dialogues_and_knows_how() -> None:
    from transformers import AutoModelForCausalLM

    from examples.tool_model.warm_start import MODEL, TOOL_SHARE, shares_as_taught

    model = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)
    for task in TASKS:
        uses_tool, *then = shares_as_taught(model, task)
        assert uses_tool == pytest.approx(TOOL_SHARE, abs=0.15)  # where RL can learn: both happen
        assert min(then) > 0.9
    assert (MODEL / "model.safetensors").stat().st_size < 2_000_000


@pytest.mark.parametrize("name", ["calculator_tool/calculator", "blackbox_agent/blackbox", "search_agent/search"])
def test_argument_files_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = parse_arguments([f"@examples/{name}.args"]).arguments
    assert arguments.sessions.is_multi_turn
    assert arguments.model.hf_checkpoint.is_dir()
    assert arguments.sessions.tool_call_parser == "examples.tool_model.calls:parse_calls"
