"""Text of tokens: that of the tokenizer itself, and which tokenizers decode alike."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from miles_async.runtime.detokenize import decode_tokens, fingerprint

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def fast(kind: type = PreTrainedTokenizerFast, *, metaspace: bool = False, marks: tuple[str, ...] = ()) -> Any:
    """Over bytes, with special tokens."""
    vocabulary = {letter: index for index, letter in enumerate(["▁", *LETTERS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    backend.add_tokens([AddedToken(mark, special=True) for mark in ("<think>", *marks)])
    return kind(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=True)


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer with code of its own after that in Rust."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


class InPython(PreTrainedTokenizer):
    """Has no text for ids from 10 on."""

    @property
    def vocab_size(self) -> int:
        return 100

    def get_vocab(self) -> dict[str, int]:
        return {}

    def _convert_id_to_token(self, index: int) -> str:
        return "abcdefghij"[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "-".join(tokens)


@pytest.mark.parametrize("tokenizer", [fast(), fast(metaspace=True), fast(Shouting)], ids=["bytes", "words", "code"])
def test_the_text_is_that_of_the_tokenizer_with_all_tokens(tokenizer: Any) -> None:
    chance = random.Random(0)
    for length in (0, 1, 7, 300):  # random bytes: characters are cut, and some are none
        ids = [chance.randrange(len(tokenizer)) for _ in range(length)]
        expected = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert decode_tokens(tokenizer, ids) == expected
    assert "<think>" in decode_tokens(tokenizer, [tokenizer.convert_tokens_to_ids("<think>")]).lower()


def test_a_tokenizer_in_python_decodes_too_and_is_compared_with_none() -> None:
    tokenizer = InPython()
    assert decode_tokens(tokenizer, [0, 1]) == "a-b"
    assert fingerprint(tokenizer) is None
    assert fingerprint(fast(Shouting)) is None


def test_tokenizers_that_decode_alike_have_one_fingerprint() -> None:
    assert fingerprint(fast()) == fingerprint(fast())
    others = [fast(metaspace=True), fast(marks=("</think>",)), fast(marks=("</answer>",))]
    assert len({fingerprint(tokenizer) for tokenizer in [fast(), *others]}) == 4
