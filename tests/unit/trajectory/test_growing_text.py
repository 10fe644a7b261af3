"""The text so far never has to be taken back."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from miles_async.runtime.detokenize import decode_tokens
from miles_async.trajectory.streamed import GrowingText
from tests.unit.runtime.test_detokenize import fast


@pytest.mark.parametrize("tokenizer", [fast(), fast(metaspace=True)], ids=["bytes", "words"])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_the_text_so_far_is_a_beginning_of_the_whole_text(tokenizer: Any, at_once: int) -> None:
    chance = random.Random(at_once)
    for _ in range(20):  # random bytes: characters are cut, and some are none
        ids = [chance.randrange(len(tokenizer)) for _ in range(60)]
        growing, before = GrowingText(partial(decode_tokens, tokenizer)), ""
        for at in range(0, len(ids), at_once):
            text = growing.add(ids[at : at + at_once])
            assert text.startswith(before)
            assert decode_tokens(tokenizer, ids).startswith(text)
            before = text


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole() -> None:
    tokenizer = fast()
    growing = GrowingText(partial(decode_tokens, tokenizer))
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "aÃ©b"]  # a, é as two bytes, b
    assert [growing.add([letter]) for letter in letters] == ["a", "a", "aé", "aéb"]
