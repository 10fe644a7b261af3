"""Messages and labels of rows mean the same in every kind of file, and what agents' messages mean."""

from __future__ import annotations

import decimal
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from miles_async.arguments import DataArguments
from miles_async.errors import DataError, TrajectoryError
from miles_async.prompts.examples import ExampleSource
from miles_async.prompts.rows import open_prompts
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate
from miles_async.trajectory.messages import canonical
from miles_async.types import JsonObject, Label, Prompt
from tests.fakes.chat_formats import STOPS, TOOLS, chat_format
from tests.unit.prompts import row_files

Write = Callable[[list[JsonObject]], Path]
QUESTION = {"role": "user", "content": "What is seventeen times four?"}
ARGUMENTS: tuple[dict[str, object], ...] = ({"query": "17*4"}, {"limit": 3})


def called(arguments: object, **fields: object) -> JsonObject:
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **fields}


@pytest.fixture
def write(file: Path) -> Write:
    return lambda rows: row_files.write(file, rows)


def prompts(path: Path, template: ChatTemplate | None = None, **flags: object) -> list[Prompt]:
    encode = (template or chat_format("qwen3")).encode
    return list(FilePromptSource(DataArguments(prompt_data=(str(path),), **flags), encode).all_prompts())


def learned(path: Path, style: str = "qwen3") -> list[str]:
    template = chat_format(style)
    arguments = DataArguments(prompt_data=(str(path),), label_key=None, metadata_key="extra", rollout_shuffle=False)
    examples = ExampleSource(arguments, template, 10_000).take(2)
    return [
        "".join(template.decode_all(branch.tokens[branch.loss_mask == 1]) for branch in example.branches)
        for example in examples
    ]


def test_calls_are_learned_as_a_model_writes_them_whatever_form_their_arguments_have(write: Write) -> None:
    objects = write([{"prompt": [QUESTION, called(given)], "extra": {"tools": TOOLS}} for given in ARGUMENTS])
    from_objects = learned(objects)  # in Parquet, "limit" is a null field of the first row's arguments
    texts = write([{"prompt": [QUESTION, called(json.dumps(a))], "extra": {"tools": TOOLS}} for a in ARGUMENTS])
    assert learned(texts) == from_objects
    assert '"arguments": {"query": "17*4"}}' in from_objects[0]
    assert '"arguments": {"limit": 3}}' in from_objects[1]


def test_null_fields_of_tools_in_parquet_files_are_not_rendered(write: Write) -> None:
    kinds = ({"query": {"type": "string"}}, {"limit": {"type": "integer"}})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": kind}}} for kind in kinds]
    path = write([{"prompt": [QUESTION], "extra": {"tools": [tool], "level": None}} for tool in tools])
    rows = prompts(path, label_key=None, metadata_key="extra")
    assert [row.metadata for row in rows] == [{"tools": [tool], "level": None} for tool in tools]


def test_null_arguments_are_kept_where_a_file_has_them_on_purpose(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [QUESTION, called({"limit": None}), QUESTION]}))
    [prompt] = prompts(path, label_key=None)
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"limit": None}


@pytest.mark.parametrize("style", [style for style in STOPS if style != "wandering"])
def test_null_fields_of_messages_and_text_parts_are_as_if_written_plainly(write: Write, style: str) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "seventeen times four?"}]
    message = {"role": "user", "content": parts, "tool_calls": None, "tool_call_id": None, "name": None}
    [prompt] = prompts(write([{"prompt": [message], "label": "68"}]), chat_format(style))
    assert prompt.messages == (QUESTION,)
    assert prompt.text == QUESTION["content"]
    assert prompt.token_ids == chat_format(style).encode([QUESTION])


def test_calls_without_content_are_a_turn(write: Write) -> None:
    turns = [called("{}", content=None), {"role": "tool", "content": "68", "tool_calls": None}]
    [prompt] = prompts(write([{"prompt": [QUESTION, *turns], "label": "68"}]))
    call = {"type": "function", "function": {"name": "search", "arguments": {}}}
    assert prompt.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert [canonical(message) for message in prompt.messages] == list(prompt.messages)  # what agents send back


def test_fields_that_only_some_templates_know_reach_them(write: Write) -> None:
    message = {**QUESTION, "channel": "final", "thinking": None}
    [prompt] = prompts(write([{"prompt": [message], "label": "68"}]))
    assert prompt.messages == ({**QUESTION, "channel": "final"},)


def test_calls_may_lack_the_wrapping_of_a_function(write: Write) -> None:
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "search", "arguments": '{"query": "x"}'}]}
    [prompt] = prompts(write([{"prompt": [QUESTION, flat, QUESTION], "label": "68"}]))
    assert prompt.messages[1]["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "x"}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": None}, "expected content, or tool calls"),
        ({"role": "assistant", "content": [{"type": "audio", "audio": "x"}]}, "parts of type text"),
        (called("{not json"), "the arguments of a tool call to be an object"),
        (called("[1]"), "the arguments of a tool call to be an object"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "b"}]}, "a tool call with a function"),
        ({"role": None, "content": "a"}, "with the texts role and content"),
    ],
)
def test_messages_that_mean_nothing_are_refused_with_their_place(write: Write, message: object, words: str) -> None:
    path = write([{"prompt": [message], "label": "68"}])
    with pytest.raises(DataError, match=rf"p\.\w+:1: 'prompt' \(--input-key\) must be .*; message 1: .*{words}"):
        open_prompts(DataArguments(prompt_data=(str(path),)))


# ------------------------------------------------------------------------------------ the beginning of an answer
@pytest.mark.parametrize("style", [style for style in STOPS if style != "wandering"])
def test_a_prompt_that_ends_with_the_assistants_words_is_continued(write: Write, style: str) -> None:
    template = chat_format(style)
    begun = {"role": "assistant", "content": "It is"}
    [prompt] = prompts(write([{"prompt": [QUESTION, begun], "label": "68"}]), template)
    rendered = template.decode_all(prompt.token_ids)
    assert rendered.endswith("It is")
    assert rendered == template.render([QUESTION, begun], (), {}, generation_prompt=False)[: len(rendered)]
    assert prompt.messages == (QUESTION, begun)


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_answer_that_did_not_begin_is_refused(content: str) -> None:
    """Llama's template would end at the header, without the empty line that its own generation prompt has."""
    message = {"role": "assistant", "content": content}
    with pytest.raises(TrajectoryError, match="is the assistant's and is empty: leave that message out"):
        chat_format("llama3").encode([QUESTION, message])
    thinking = message | {"reasoning_content": "hm"}
    with pytest.raises(TrajectoryError, match="nothing but thoughts, which the chat template leaves out"):
        chat_format("llama3").encode([QUESTION, thinking])
    template = chat_format("qwen3")
    assert "<think>\nhm\n</think>" in template.decode_all(template.encode([QUESTION, thinking]))
    for none in (None, []):
        assert template.encode([QUESTION, message | {"content": "It is", "reasoning_content": none}])


@pytest.mark.parametrize("content", ["<think>", "<think>\n", " <think>\nLet me"])
def test_a_thought_after_an_empty_one_of_the_template_is_refused(content: str) -> None:
    """Qwen3's template closes the thought that it finds none of; it keeps one that ended."""
    with pytest.raises(TrajectoryError, match="opens a thought, and the chat template writes an empty one before"):
        chat_format("qwen3").check([QUESTION, {"role": "assistant", "content": content}])
    own = {"role": "assistant", "content": content, "reasoning_content": "It is even."}
    chat_format("qwen3").check([QUESTION, own])  # the thought before it is the message's own
    for style, begun in {"llama3": content, "qwen3": "<think>\nhm\n</think>\n\nIt is"}.items():
        chat_format(style).check([QUESTION, {"role": "assistant", "content": begun}])


def test_a_prompt_that_nothing_can_continue_is_refused() -> None:
    template = chat_format("qwen3")
    for refused in (template.check, template.encode):
        with pytest.raises(TrajectoryError, match="has tool calls, which nothing continues"):
            refused([QUESTION, canonical(called("{}"))])
    for_environments = ChatTemplate(template.tokenizer, apply_chat_template=True, continues_answers=False)
    with pytest.raises(TrajectoryError, match="whose turn comes next: leave that message out"):
        for_environments.check([QUESTION, {"role": "assistant", "content": "It is"}])
    for_environments.check([QUESTION])


# ------------------------------------------------------------------------------------------------------ labels
def labels(path: Path) -> list[Label | None]:
    return [prompt.label for prompt in prompts(path)]


def test_whole_numbers_are_labels_without_a_point(write: Write) -> None:
    """A column of whole numbers becomes one of floats where a table once had gaps."""
    floats = write([{"prompt": "a", "label": label} for label in (42.0, -7.0, 0.5, 0.00001, 1e300)])
    assert labels(floats) == ["42", "-7", "0.5", "0.00001", "1e+300"]
    assert labels(write([{"prompt": "a", "label": label} for label in (42, 2**60 + 1)])) == ["42", str(2**60 + 1)]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pyarrow.array(np.float16([0.1, 42, 1 / 3])), ["0.1", "42", "0.3333"]),
        (pyarrow.array([0.1, 42, 1 / 3], pyarrow.float32()), ["0.1", "42", "0.33333334"]),
        (pyarrow.array([0.1, 42, 1 / 3], pyarrow.float64()), ["0.1", "42", "0.3333333333333333"]),
        (pyarrow.array([1e-5, -2.5e-7, 0], pyarrow.float32()), ["0.00001", "-0.00000025", "0"]),
        (pyarrow.array([1, 255, 7], pyarrow.uint8()), ["1", "255", "7"]),
        (pyarrow.array([decimal.Decimal(text) for text in ("1.50", "42.00", "0.00")]), ["1.5", "42", "0"]),
        (pyarrow.array([decimal.Decimal(text) for text in ("400", "1E+2", "-7")]), ["400", "100", "-7"]),
        (pyarrow.array([decimal.Decimal("0." + "12" * 18 + "0")] * 3), ["0." + "12" * 18] * 3),
        (pyarrow.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pyarrow.Array) else "",
)
def test_columns_of_every_type_are_labels_as_people_write_them(
    tmp_path: Path, column: pyarrow.Array, expected: list[str]
) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "label": column}), path)
    assert labels(path) == expected


@pytest.mark.parametrize("gap", [None, float("nan"), float("inf")])
def test_a_gap_is_no_label(tmp_path: Path, gap: float | None) -> None:
    path = tmp_path / "rows.parquet"
    column = pyarrow.array([1.0, gap], pyarrow.float64())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "label": column}), path)
    with pytest.raises(DataError, match=r"rows\.parquet:2: 'label' \(--label-key\) must be a text or a number"):
        open_prompts(DataArguments(prompt_data=(str(path),)))
