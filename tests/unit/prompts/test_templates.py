"""Text → tokens → text with a real tokenizer: <bos> once, responses as sampled between their bounds, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from miles_async.errors import ConfigurationError, TrajectoryError
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.rewards.answers import find_answer
from miles_async.rewards.text_match import matches
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import ReplyParser
from miles_async.trajectory.tree import Trajectory
from tests.fakes.chat_formats import chat_template
from tests.fakes.reply_parsers import split_think
from tests.property.builders import make_generation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", *"0123456789 rev"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tokenizer of single characters that, like many, adds <bos> to plain texts by itself."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.add_special_tokens([token for token in VOCABULARY if token.startswith("<")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(path)
    return path


@pytest.fixture
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(directory)


def ids(*tokens: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.index(token) for token in tokens)


def test_text_is_a_message_of_the_user(tokenizer: PreTrainedTokenizerBase):
    template = ChatTemplate(tokenizer, apply_chat_template=True)
    expected = ids("<bos>", "<|user|>", *"rev 12", "<|assistant|>")
    assert template.encode("rev 12") == expected
    assert template.encode([{"role": "user", "content": "rev 12"}]) == expected


def test_bos_occurs_once_with_and_without_template(tokenizer: PreTrainedTokenizerBase):
    plain = ChatTemplate(tokenizer, apply_chat_template=False)
    assert plain.encode("rev") == ids("<bos>", *"rev")
    assert plain.encode("<bos>rev") == ids("<bos>", *"rev")
    assert ChatTemplate(tokenizer, apply_chat_template=True).encode("rev").count(VOCABULARY.index("<bos>")) == 1


def test_decode_removes_the_token_that_ends_the_turn(tokenizer: PreTrainedTokenizerBase):
    template = ChatTemplate(tokenizer, apply_chat_template=True)
    assert template.decode(ids("2", "1", "<eos>")).replace(" ", "") == "21"


def test_tokenizer_is_loaded_once(directory: Path):
    """# covers: M22"""
    assert load_tokenizer(directory) is load_tokenizer(directory)


def test_missing_files_are_named(tmp_path: Path, directory: Path):
    from transformers import AutoTokenizer

    with pytest.raises(ConfigurationError, match=r"--hf-checkpoint .*absent: there is no such directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="no usable tokenizer there"):
        load_tokenizer(tmp_path)
    without_template = AutoTokenizer.from_pretrained(directory)
    without_template.chat_template = None
    with pytest.raises(ConfigurationError, match="use --no-apply-chat-template"):
        ChatTemplate(without_template, apply_chat_template=True)
    with pytest.raises(ConfigurationError, match="leave --no-apply-chat-template out"):
        ChatTemplate(without_template, apply_chat_template=False).encode([{"role": "user", "content": "rev"}])


def test_messages_that_the_template_leaves_out_are_the_prompts_fault(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    users = "{% for m in messages if m['role'] in ['user', 'critic'] %}{{ m['content'] | trim }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", users)
    template = ChatTemplate(tokenizer, apply_chat_template=True)
    asked = {"role": "user", "content": " 1"}
    for refused in (template.check, template.encode, template.check):
        with pytest.raises(TrajectoryError, match=r"leaves out messages of the role 'system' in a .* of system, user"):
            refused([{"role": "system", "content": "2"}, asked])
        with pytest.raises(TrajectoryError, match=r"roles assistant, .* names, found role 'human'"):
            refused([{"role": "human", "content": "1"}])
    template.check([{"role": "critic", "content": "1"}, asked])


def test_whatever_a_template_raises_is_told(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 1 // 0 }}")
    with pytest.raises(TrajectoryError, match=r"the chat template refuses this conversation: .*division"):
        ChatTemplate(tokenizer, apply_chat_template=True).encode("1")


def test_a_prompt_that_the_template_refuses_is_the_prompts_fault(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('users only') }}")
    template = ChatTemplate(tokenizer, apply_chat_template=True)
    for refused in (template.check, template.encode):
        with pytest.raises(TrajectoryError, match="the chat template refuses this conversation: users only"):
            refused([{"role": "system", "content": "a"}])
    ChatTemplate(tokenizer, apply_chat_template=False).check("a plain text needs no template")


# --------------------------------------------------------------------------------------------------- responses
TURNS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKS = ("<think>", "</think>", "<answer>", "</answer>", "[TOOL_CALLS]")


@pytest.fixture(params=["special", "ordinary"])
def thinking(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTemplate:
    """A template over bytes, with the marks of structure as special tokens or not. Only <eos> is known to end a turn,
    not the template's <|end|>, as with base models.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>", "<|start|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken(mark, special=request.param == "special", normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=TURNS
    )
    fast.save_pretrained(tmp_path)
    template = ChatTemplate(load_tokenizer(tmp_path), apply_chat_template=True)
    assert len(template.tokenize("".join(MARKS))) == len(MARKS)
    return template


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        ("<think>\n3+4\n</think>\n <answer>7</answer><eos>", "<think>\n3+4\n</think>\n <answer>7</answer>"),
        ('[TOOL_CALLS][{"name": "f"}]<|end|>', '[TOOL_CALLS][{"name": "f"}]'),
        (" 7 \n<eos><pad><pad>", " 7 \n"),
        ("7<|end|>\n<eos>", "7"),
        ("<bos>7", "7"),
        ("<think>7</think><eos>", "<think>7</think>"),
        ("<eos>", ""),
        ("7<|end|>\n<|start|>user\n8<eos>", "7<|end|>\n<|start|>user\n8"),  # what the model wrote, nothing hidden
        ("<pad>" * 20_000 + "7" + "<pad>\n" * 20_000 + "<eos>", "7"),  # in time
        ("<pad>" * 20_000 + "7", "7"),
        ("7" + "<pad>" * 20_000 + "8", "7" + "<pad>" * 20_000 + "8"),
    ],
    ids=range(11),
)
def test_a_response_keeps_the_tokens_that_mark_its_parts(thinking: ChatTemplate, sampled: str, text: str) -> None:
    assert thinking.decode(thinking.tokenize(sampled)) == text


def test_every_token_at_which_engines_stop_ends_a_turn(thinking: ChatTemplate) -> None:
    directory = Path(thinking.tokenizer.name_or_path)
    end, pad, start, eos, bos = thinking.tokenize("<|end|><pad><|start|><eos><bos>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [pad]}))
    stops = ("<|start|>", "<bos><eos>", "a<|end|>")  # those of several tokens end a turn as texts
    template = ChatTemplate(load_tokenizer(directory), apply_chat_template=True, stops=stops)
    assert template.stop_ids == {end, pad, start, eos}
    assert bos not in template.stop_ids


def test_rewards_see_thoughts_as_thoughts(thinking: ChatTemplate) -> None:
    text = thinking.decode(thinking.tokenize(r"<think>or \boxed{3}?</think>It is 7.<eos>"))
    assert matches("<think>.*</think>.*", text)
    assert find_answer(text).text == "It is 7."


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("call.function.arguments | tojson", ['{"q": "größer", "n": [1]}', '"{cut"', '"{\\"q\\": 1}"']),
        ("'' + call.function.arguments", ['{"q": "größer", "n": [1]}', "{cut", '{"q": 1}']),  # as DeepSeek-V3 has it
    ],
)
def test_arguments_of_calls_are_what_the_template_takes(arguments: str, written: list[str]) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}[{{ "
        + arguments
        + " }}]{% endfor %}{% endfor %}"
    )
    chat = chat_template(source, ("</s>",), "<s>")
    for given, text in zip(({"q": "größer", "n": [1]}, "{cut", '{"q": 1}'), written, strict=True):
        call = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": given}}
        asked = {"role": "user", "content": "b", "tool_calls": None}  # as clients' models dump it
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert chat.render(messages, (), {}, generation_prompt=False) == f"b[{text}]"


@pytest.mark.parametrize("splits", [True, False])
def test_replies_to_agents_have_the_same_text(thinking: ChatTemplate, splits: bool) -> None:
    parser = ReplyParser(chat=thinking, split_reasoning=split_think if splits else None)
    trajectory = Trajectory(Renderer(thinking), parser)
    context = trajectory.extend([{"role": "user", "content": "3+4?"}])
    ids = thinking.tokenize("<think>\nhm\n</think>\n<answer>7</answer><|end|>")
    turn = trajectory.add(context, make_generation(ids))
    assert turn.text == "<think>\nhm\n</think>\n<answer>7</answer>"
    assert turn.reply == (
        {"role": "assistant", "content": "<answer>7</answer>", "reasoning_content": "hm"}
        if splits
        else {"role": "assistant", "content": turn.text}
    )
    sample = trajectory.sample()
    assert sample is not None
    assert sample.text == turn.text
