"""Token ids are those of tokenizer.json, whichever class of transformers a model's files name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer

TEXT = "hello  world 1234 é\n fox"


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes, as of Llama 3 and DeepSeek, with digits in threes and no <s> added by the file itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["hello  world 1234 quick brown fox"] * 5, trainer)
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("adds_bos", [True, False, None])
@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "deepseek_v3"])
def test_ids_are_those_of_the_file(
    tmp_path: Path, tokenizer_json: Path, model_type: str, named: str, adds_bos: bool | None
) -> None:
    from tokenizers import Tokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    settings = {"tokenizer_class": named, "add_bos_token": adds_bos, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    tokenizer = load_tokenizer(tmp_path)

    expected = Tokenizer.from_file(str(tokenizer_json)).encode(TEXT).ids
    assert tokenizer.encode(TEXT, add_special_tokens=False) == expected
    assert tokenizer.decode(expected) == TEXT
    # Transformers 4 added <s> for Llama's classes, unless told not to.
    opening = [0] if named.startswith("Llama") and adds_bos is not False else []
    assert tokenizer.encode(TEXT) == opening + expected


def test_truncation_and_padding_that_the_file_has_change_nothing(tmp_path: Path, tokenizer_json: Path) -> None:
    from tokenizers import Tokenizer

    left_over = Tokenizer.from_file(str(tokenizer_json))
    expected = left_over.encode(TEXT).ids
    left_over.enable_truncation(5)
    left_over.enable_padding(length=64)
    left_over.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate(load_tokenizer(tmp_path), apply_chat_template=False).tokenize(TEXT) == expected
