"""Conversations to learn from: what carries loss is what a model would have sampled, in every style of templates.

# covers: C12
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError
from miles_async.prompts.conversations import Answered, answered, conversation, tools_of
from miles_async.prompts.examples import ExampleSource
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate
from miles_async.types.pictures import data_url
from tests.fakes.chat_formats import STOPS, TOOLS, chat_format
from tests.fakes.pictures import picture, picture_processor

STYLES = [style for style in STOPS if style != "wandering"]  # which writes every conversation otherwise
QUESTION = {"role": "user", "content": "What is seventeen times four?"}
ANSWER = {"role": "assistant", "content": "It is 68."}
MORE = [{"role": "user", "content": "And plus three?"}, {"role": "assistant", "content": "Then 71."}]


def learned(template: ChatTemplate, branch: Answered) -> str:
    return template.decode_all(branch.tokens[branch.loss_mask == 1])


def whole(template: ChatTemplate, branch: Answered) -> str:
    return template.decode_all(branch.tokens)


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_is_learned_up_to_the_token_that_ends_it(style: str) -> None:
    template = chat_format(style)
    [branch] = answered(template, [QUESTION, ANSWER], ())
    prompt = list(template.encode([QUESTION]))
    assert branch.tokens[: len(prompt)].tolist() == prompt  # as engines are given it
    assert not branch.loss_mask[: len(prompt)].any()
    assert branch.loss_mask[len(prompt) :].all()
    assert branch.tokens[-1] in template.stop_ids
    assert learned(template, branch).removesuffix(STOPS[style][0]).endswith("It is 68.")


@pytest.mark.parametrize("style", STYLES)
def test_every_turn_is_learned_where_it_would_be_generated(style: str) -> None:
    template = chat_format(style)
    messages = [QUESTION, ANSWER, *MORE]
    branches = answered(template, messages, ())
    assert len(branches) == {"qwen3": 2}.get(style, 1)  # Qwen3 drops the (empty) reasoning of earlier turns
    texts = [learned(template, branch) for branch in branches]
    assert "".join(texts).count("68") == "".join(texts).count("71") == 1
    second = list(template.encode(messages[:3]))
    assert branches[-1].tokens[: len(second)].tolist() == second
    assert not any("What is" in text or "plus" in text for text in texts)
    for branch in branches:
        assert branch.tokens.dtype == np.int32
        assert len(branch.tokens) == len(branch.loss_mask)
        assert branch.loss_mask[-1] == 1


def test_a_turn_that_the_next_message_ends_is_learned_with_its_beginning() -> None:
    """GLM samples <|user|> to stop; after the last turn comes the end of the text."""
    template = chat_format("glm")
    [branch] = answered(template, [QUESTION, ANSWER, *MORE], ())
    assert learned(template, branch) == "\n<think></think>\nIt is 68.<|user|>\n<think></think>\nThen 71.<|endoftext|>"


def test_a_turn_may_be_context_only() -> None:
    template = chat_format("llama3")
    [branch] = answered(template, [QUESTION, {**ANSWER, "step_loss_mask": 0}, *MORE], ())
    assert learned(template, branch).startswith("Then 71.")
    assert "It is 68." in whole(template, branch)
    with pytest.raises(DataError, match="a turn of the assistant to learn, found none"):
        answered(template, [QUESTION, {**ANSWER, "step_loss_mask": 0}], ())


def test_tools_are_rendered_and_their_results_are_not_learned() -> None:
    template = chat_format("qwen3")
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "17 times 4"}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sixty-eight"},
        ANSWER,
    ]
    branches = answered(template, messages, TOOLS)
    assert all("open_page" in whole(template, branch) for branch in branches)
    texts = "".join(learned(template, branch) for branch in branches)
    assert '{"name": "search"' in texts
    assert "sixty-eight" not in texts
    assert tools_of({"tools": TOOLS}) == TOOLS
    with pytest.raises(DataError, match="a list of objects"):
        tools_of({"tools": "search"})


def test_conversations_without_a_question_are_refused() -> None:
    with pytest.raises(DataError, match="its turn first"):
        answered(chat_format("llama3"), [ANSWER, QUESTION], ())


def test_a_label_is_the_answer_where_there_is_none() -> None:
    assert conversation([QUESTION], "It is 68.") == [QUESTION, ANSWER]
    assert conversation([QUESTION, ANSWER], "other") == [QUESTION, ANSWER]
    with pytest.raises(DataError, match="--label-key"):
        conversation([QUESTION], None)


def rows(path: Path, *content: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def source(path: Path, most: int = 1000, style: str = "llama3", **data: object) -> ExampleSource:
    arguments, chat = DataArguments(prompt_data=(str(path),), rollout_shuffle=False, **data), chat_format(style)
    return ExampleSource(arguments, chat, most, images=picture_processor(chat) if style == "qwen25_vl" else None)


def test_rows_are_examples_in_the_order_of_prompts_and_the_cursor_goes_on(tmp_path: Path) -> None:
    # covers: C9
    path = rows(tmp_path / "a.jsonl", *({"prompt": f"{n}?", "label": str(n)} for n in range(5)))
    examples = source(path)
    assert [(e.epoch, e.prompt.label) for e in examples.take(3)] == [(0, "0"), (0, "1"), (0, "2")]
    state = examples.state()
    expected = [(e.epoch, e.prompt.label, e.branches[0].tokens.tolist()) for e in examples.take(4)]
    assert [epoch for epoch, *_ in expected] == [0, 0, 1, 1]
    again = source(path)
    again.restore(state)
    assert [(e.epoch, e.prompt.label, e.branches[0].tokens.tolist()) for e in again.take(4)] == expected


def test_examples_that_are_too_long_are_skipped_and_counted(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", *({"prompt": "?", "label": "a " * n} for n in (1, 400, 2)))
    examples = source(path, most=100)
    assert [len(e.prompt.label or "") for e in examples.take(4)] == [2, 4, 2, 4]
    assert examples.skipped == 1
    examples.require_usable()
    none = source(path, most=5)
    for use in (none.require_usable, lambda: none.take(1)):
        with pytest.raises(
            DataError, match=r"all 3 prompts have more than 5 tokens \(an example .*: raise --max-tokens-"
        ):
            use()


def test_skipped_examples_take_no_share_of_a_weight(tmp_path: Path) -> None:
    # covers: R11
    a, b, c = (
        rows(tmp_path / f"{name}.jsonl", *({"prompt": "?", "label": f"{name} " * n} for n in lengths))
        for name, lengths in {"a": (1, *[400] * 9), "b": (1, 2), "c": (300, 400)}.items()
    )

    def mixed(*paths: Path) -> ExampleSource:
        arguments = DataArguments(prompt_data=tuple(map(str, paths)), prompt_data_weights=("3", "1"))
        return ExampleSource(arguments, chat_format("llama3"), 100)

    taken = [example.prompt.prompt_id[0] for example in mixed(a, b).take(40)]
    for begin in range(0, 40, 4):
        assert Counter(taken[begin : begin + 4]) == {"a": 3, "b": 1}
    for use in (mixed(b, c).require_usable, lambda: mixed(b, c).take(4)):
        with pytest.raises(DataError, match=r"^\S*c\.jsonl: all 2 prompts have more than 100 tokens"):
            use()


ASKED = {"messages": [QUESTION]}
ANSWERED = {"messages": [QUESTION, ANSWER]}


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        (ASKED, {}, "expected an answer, found neither a last turn of the assistant nor a label"),
        ({"messages": [ANSWER, QUESTION, ANSWER]}, {}, "expected something for the assistant to answer"),
        ({"messages": [QUESTION, {**ANSWER, "step_loss_mask": 0}]}, {}, "expected a turn of the assistant to learn"),
        ({**ANSWERED, "m": {"tools": "search"}}, {"metadata_key": "m"}, "a list of objects"),
        ({**ASKED, "label": ["1", "one"]}, {"label_key": "label"}, "expected one answer to learn, found 2"),
        ({"messages": "?", "label": ["1", "one"]}, {"apply_chat_template": False, "label_key": "label"}, "found 2"),
        ({"messages": "?"}, {"apply_chat_template": False}, "expected an answer, found no label"),
    ],
)
def test_a_row_without_an_answer_is_named_when_its_file_is_opened(
    row: dict, flags: dict, message: str, tmp_path: Path
) -> None:
    keys = {"input_key": "messages", "label_key": None, **flags}
    path = rows(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{message}.*--bad-rows skip"):
        source(path, **keys)
    with pytest.raises(DataError, match=rf"all 1 rows are skipped, the first, .*a\.jsonl:1, since: .*{message}"):
        source(path, bad_rows="skip", **keys).require_usable()


def test_rows_without_an_answer_are_skipped_if_bad_rows_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows(tmp_path / "a.jsonl", ANSWERED, ASKED, ANSWERED)
    examples = source(path, input_key="messages", label_key=None, bad_rows="skip")
    assert [(e.epoch, e.prompt.prompt_id[-1]) for e in examples.take(4)] == [(0, "1"), (0, "3"), (1, "1"), (1, "3")]
    assert examples.skipped == 1
    assert "a.jsonl:2 skipped: expected an answer" in caplog.text


def test_messages_of_a_row_are_learned(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"messages": [QUESTION, ANSWER], "extra": {"tools": TOOLS}})
    [example] = source(path, input_key="messages", label_key=None, metadata_key="extra").take(1)
    assert learned(chat_format("llama3"), example.branches[0]) == "It is 68.<|eot_id|>"


def test_the_images_of_a_row_are_learned_about_as_they_are_prompted_with(tmp_path: Path) -> None:
    chat = chat_format("qwen25_vl")
    images = picture_processor(chat)
    urls = [data_url(picture(2, 2)), data_url(picture(1, 3, "blue"))]
    row = {"prompt": "<image> and <image>?", "images": urls, "label": "It is 68."}
    arguments = DataArguments(
        prompt_data=(str(rows(tmp_path / "a.jsonl", row)),), multimodal_keys='{"image": "images"}'
    )
    [(_, prompt)] = FilePromptSource(arguments, chat.encode, expand=images.expand).take(1)
    [example] = ExampleSource(arguments, chat, 1000, images=images).take(1)
    [branch] = example.branches
    assert branch.tokens.tolist() == [*prompt.token_ids, *chat.tokenize("It is 68.<|im_end|>")]
    assert branch.loss_mask.tolist() == [0] * len(prompt.token_ids) + [1] * (len(branch.tokens) - len(prompt.token_ids))
    assert branch.pictures == prompt.pictures
    assert len(branch.pictures) == 2


def test_a_branch_has_the_images_up_to_its_last_turn(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(picture(2, 2))}}
    asked = [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}, ANSWER]
    later = [{"role": "user", "content": [image]}, {**ANSWER, "step_loss_mask": 0}]
    path = rows(tmp_path / "a.jsonl", {"messages": [*asked, *later, *asked]}, {"messages": [*asked, *later]})
    found = source(path, input_key="messages", label_key=None, style="qwen25_vl").take(2)
    token = picture_processor(chat_format("qwen25_vl")).image_token
    assert [len(example.branches[0].pictures) for example in found] == [3, 1]
    assert [(example.branches[0].tokens == token).sum() for example in found] == [3 * 4, 4]


REFUSED = {"prompt": [{"role": "referee", "content": "?"}], "label": "1"}


def test_rows_that_the_template_refuses_are_named_before_training_or_skipped(tmp_path: Path) -> None:
    good = {"prompt": [QUESTION], "label": "68"}
    path = rows(tmp_path / "a.jsonl", good, REFUSED, good)
    examples = source(path)
    with pytest.raises(DataError, match=r"a.jsonl:2: .*referee.*--bad-rows skip"):
        examples.require_rendered(examples.check)
    with pytest.raises(DataError, match=r"a.jsonl:2: .*referee"):
        examples.take(2)
    examples = source(path, bad_rows="skip")
    examples.require_rendered(examples.check)
    assert [(e.epoch, e.prompt.prompt_id[-1]) for e in examples.take(4)] == [(0, "1"), (0, "3"), (1, "1"), (1, "3")]
    assert examples.skipped == 1
    path = rows(tmp_path / "c.jsonl", good, {"prompt": [QUESTION], "label": ["1", "one"]}, REFUSED)
    examples = source(path, bad_rows="skip")
    (note,) = examples.skip_notes(examples.check)
    assert note.startswith("2 of 3 rows are skipped (--bad-rows skip), the first: ")
    assert "c.jsonl:2: " in note
    nothing_else = source(rows(tmp_path / "b.jsonl", REFUSED), bad_rows="skip")
    with pytest.raises(DataError, match=r"all 1 rows are skipped, the first, .*b.jsonl:1, since: .*referee"):
        nothing_else.take(1)


def test_plain_texts_are_answered_without_a_template(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"prompt": "three and", "label": " four"})
    template = ChatTemplate(chat_format("llama3").tokenizer, apply_chat_template=False)
    arguments = DataArguments(prompt_data=(str(path),), apply_chat_template=False)
    [example] = ExampleSource(arguments, template, 100).take(1)
    assert learned(template, example.branches[0]) == " four<|eot_id|>"
    assert whole(template, example.branches[0]).endswith("three and four<|eot_id|>")
