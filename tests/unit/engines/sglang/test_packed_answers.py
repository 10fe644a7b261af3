"""What an engine packs with an answer: the text of the model's turn, if it decodes as the client does."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.engines.sglang import packed_answers
from miles_async.engines.sglang.answers import DECODER, MEDIA_TYPE, TEXT_FROM, pack, read_answer
from miles_async.runtime.detokenize import decode_tokens, fingerprint
from tests.unit.runtime.test_detokenize import InPython, fast

TOKENIZER = fast()
LETTERS = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "Ã©ab"]  # é and two letters, a token per byte
FINGERPRINT = fingerprint(TOKENIZER)


def reply(ids: list[int], finish_reason: str = "stop") -> dict[str, Any]:
    entries = [(-0.5, token, None) for token in ids]
    meta = {"finish_reason": {"type": finish_reason}, "weight_version": "3", "output_token_logprobs": entries}
    return {"text": "", "output_ids": ids, "meta_info": meta}


def packed_text(body: dict[str, Any], content: Any, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> str | None:
    packed_answers._fingerprint.cache_clear()
    monkeypatch.setattr(packed_answers, "_tokenizer", lambda: tokenizer)
    packed = packed_answers._pack_answer(body, content)
    assert packed is not None
    return read_answer(packed, MEDIA_TYPE, "", lambda spans, label, tokens: None).text  # type: ignore[arg-type, return-value]


def test_the_text_is_of_the_whole_turn_and_a_character_may_begin_in_an_earlier_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, *rest = LETTERS
    body = {"input_ids": [5, 6, first], TEXT_FROM: 2, DECODER: FINGERPRINT}
    text = packed_text(body, reply([second, *rest]), monkeypatch, TOKENIZER)
    assert text == decode_tokens(TOKENIZER, LETTERS) == "éab"


@pytest.mark.parametrize(
    ("field", "finish_reason", "tokenizer"),
    [
        ({}, "stop", TOKENIZER),
        ({DECODER: FINGERPRINT}, "abort", TOKENIZER),  # the turn goes on
        ({DECODER: 1}, "stop", TOKENIZER),
        ({DECODER: FINGERPRINT}, "stop", fast(metaspace=True)),
        ({DECODER: FINGERPRINT}, "stop", InPython()),
        ({DECODER: FINGERPRINT}, "stop", None),  # --skip-tokenizer-init
    ],
    ids=["not asked", "aborted", "other client", "other decoder", "in Python", "none"],
)
def test_there_is_no_text_unless_client_and_engine_decode_alike_and_the_turn_is_over(
    field: dict[str, Any], finish_reason: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"input_ids": [5], TEXT_FROM: 1, **field}
    assert packed_text(body, reply(LETTERS, finish_reason), monkeypatch, tokenizer) is None


@pytest.mark.parametrize("content", [[], {"error": "no"}, {"output_ids": [], "meta_info": {"id": "a"}}])
def test_what_is_no_single_answer_stays_as_it_is(content: Any) -> None:
    assert packed_answers._pack_answer({"input_ids": [5], TEXT_FROM: 1, DECODER: FINGERPRINT}, content) is None
    assert pack(content) is None
