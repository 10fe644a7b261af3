"""Prompt data as verl, TRL, ShareGPT and others have it, without a flag that names columns.

# covers: P8
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.data import DataArguments
from miles_async.prompts.examples import ExampleSource
from miles_async.runs.prompt_checks import check_prompts
from miles_async.types import JsonObject
from tests.fakes.chat_formats import chat_format
from tests.unit.prompts.row_files import prompts, refusal, write

QUESTION = [{"role": "user", "content": "1 + 1"}]
ANSWER = {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}


def test_verl(file: Path) -> None:
    [prompt] = prompts(write(file, [VERL]))
    assert (list(prompt.messages), prompt.label, prompt.prompt_id) == (QUESTION, "2", f"{file.name}:1")
    assert prompt.metadata == {"index": 7, "split": "train", "data_source": "openai/gsm8k", "ability": "math"}


def test_verl_without_more_than_it_needs(file: Path) -> None:
    [prompt] = prompts(write(file, [{"prompt": QUESTION, "reward_model": {"ground_truth": 2}}]))
    assert (prompt.label, prompt.metadata) == ("2", {})


def test_a_broken_row_of_verl_names_row_and_column(file: Path) -> None:
    broken = {**VERL, "reward_model": {"style": "rule", "ground_truth": {"target": "2"}}}
    message = refusal(write(file, [broken]))
    assert message.startswith(f"{file}:1: 'reward_model.ground_truth' (--label-key) must be a text or a number")


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "1 + 1", "completion": "2"}, QUESTION),
        ({"prompt": QUESTION, "completion": [ANSWER]}, QUESTION),
        ({"prompt": QUESTION, "completion": [ANSWER, QUESTION[0], ANSWER]}, [*QUESTION, ANSWER, *QUESTION]),
        ({"messages": [*QUESTION, ANSWER]}, QUESTION),
        ({"messages": [*QUESTION, ANSWER, *QUESTION, ANSWER]}, [*QUESTION, ANSWER, *QUESTION]),
        (
            {
                "system": "be brief",
                "conversations": [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}],
            },
            [{"role": "system", "content": "be brief"}, *QUESTION],
        ),
    ],
)
def test_conversations_are_a_prompt_and_its_answer(row: JsonObject, messages: list[JsonObject], file: Path) -> None:
    [prompt] = prompts(write(file, [row]))
    assert (list(prompt.messages), prompt.label) == (messages, "2")


def test_calls_of_tools_in_conversations(file: Path) -> None:
    turns = [
        {"from": "human", "value": "1 + 1"},
        {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
    ]
    [prompt] = prompts(write(file, [{"conversations": turns}]))
    assert list(prompt.messages) == [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
    ]


def test_a_conversation_that_ends_with_a_call_is_learned_whole(tmp_path: Path) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    path = write(tmp_path / "p.jsonl", [{"messages": [*QUESTION, calling]}])
    assert "p.jsonl:1: the last message is the assistant's and has tool calls" in refusal(path)
    [example] = ExampleSource(DataArguments(prompt_data=(str(path),)), chat_format("qwen3"), 10_000).take(1)
    begin = chat_format("qwen3").encode(QUESTION)
    learned = example.branches[0].tokens[example.branches[0].loss_mask == 1]
    assert len(begin) == len(example.branches[0].tokens) - len(learned)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"from": "robot", "value": "a"}, "p.jsonl:1: conversations[1].from must be one of human, user, system, gpt"),
        ({"from": "function_call", "value": "{"}, "p.jsonl:1: conversations[1].value of a function_call must be JSON"),
        ({"from": "function_call", "value": "{}"}, "p.jsonl:1: conversations[1].value of a function_call must be JSON"),
        ({"from": "gpt", "value": 7}, "p.jsonl:1: 'conversations' (--input-key) must be a text or a list of messages"),
        ("hello", "p.jsonl:1: 'conversations' (--input-key) must be a text or a list of messages; message 2:"),
    ],
)
def test_broken_turns(turn: object, message: str, tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "1 + 1"}, turn]}
    assert message in refusal(write(tmp_path / "p.jsonl", [row]))


def test_flags_and_usual_columns_come_first(file: Path) -> None:
    row = {**VERL, "label": "3", "question": "1 + 2"}
    write(file, [row])
    assert prompts(file)[0].label == "3"
    assert prompts(file, input_key="question")[0].text == "1 + 2"
    assert prompts(file, label_key="reward_model.style")[0].label == "rule"


def test_unknown_columns_are_named_with_those_that_are_known(file: Path) -> None:
    message = refusal(write(file, [{"instruction": "1 + 1", "output": "2"}]))
    assert "instruction, output" in message
    assert "recognized without flags: prompt and label; verl: prompt and reward_model; TRL: prompt and com" in message
    assert "recognized" not in refusal(file, input_key="question")


def test_a_dry_run_says_what_was_recognized(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", [VERL])
    _, [note] = check_prompts(Arguments(data=DataArguments(prompt_data=(str(path),))))
    assert note == (
        f"{path}: has the columns of verl: --input-key prompt --label-key reward_model.ground_truth "
        "--metadata-key extra_info"
    )
