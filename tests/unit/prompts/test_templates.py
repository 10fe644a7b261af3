"""Text → tokens → text with a real tokenizer: <bos> once, special tokens out of responses, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.errors import ConfigurationError, TrajectoryError
from miles_async.prompts.templates import ChatTemplate, load_tokenizer

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
def tokenizer(directory: Path) -> Any:
    return load_tokenizer(directory)


def ids(*tokens: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.index(token) for token in tokens)


def test_text_is_a_message_of_the_user(tokenizer: Any):
    template = ChatTemplate(tokenizer, apply_chat_template=True)
    expected = ids("<bos>", "<|user|>", *"rev 12", "<|assistant|>")
    assert template.encode("rev 12") == expected
    assert template.encode([{"role": "user", "content": "rev 12"}]) == expected


def test_bos_occurs_once_with_and_without_template(tokenizer: Any):
    plain = ChatTemplate(tokenizer, apply_chat_template=False)
    assert plain.encode("rev") == ids("<bos>", *"rev")
    assert plain.encode("<bos>rev") == ids("<bos>", *"rev")
    assert ChatTemplate(tokenizer, apply_chat_template=True).encode("rev").count(VOCABULARY.index("<bos>")) == 1


def test_decode_removes_special_tokens_only(tokenizer: Any):
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


def test_messages_that_the_template_leaves_out_are_the_prompts_fault(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
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


def test_whatever_a_template_raises_is_told(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 1 // 0 }}")
    with pytest.raises(TrajectoryError, match=r"the chat template refuses this conversation: .*division"):
        ChatTemplate(tokenizer, apply_chat_template=True).encode("1")


def test_a_prompt_that_the_template_refuses_is_the_prompts_fault(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('users only') }}")
    template = ChatTemplate(tokenizer, apply_chat_template=True)
    for refused in (template.check, template.encode):
        with pytest.raises(TrajectoryError, match="the chat template refuses this conversation: users only"):
            refused([{"role": "system", "content": "a"}])
    ChatTemplate(tokenizer, apply_chat_template=False).check("a plain text needs no template")
