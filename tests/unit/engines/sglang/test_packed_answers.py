"""What an engine packs with an answer: the text of the model's turn, if it decodes as the client does."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from miles_async.engines.sglang import packed_answers
from miles_async.engines.sglang.answers import (
    DECODER,
    MEDIA_TYPE,
    TEXT_FROM,
    EventPacker,
    pack,
    read_answer,
    read_event,
)
from miles_async.errors import TransientEngineError
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


# --------------------------------------------------------------------------------------------------- streams
def test_events_have_new_tokens_and_the_last_one_the_packed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_answers._fingerprint.cache_clear()
    monkeypatch.setattr(packed_answers, "_tokenizer", lambda: TOKENIZER)
    body = {"input_ids": [5], TEXT_FROM: 1, DECODER: FINGERPRINT}
    packer = EventPacker(partial(packed_answers._pack_answer, body))
    events = [packer(so_far(LETTERS[:count])) for count in (1, 3)]
    events.append(packer(reply(LETTERS)))
    told: list[int] = []
    for event in events:
        read = read_event(json.dumps(event).encode(), len(told), "")
        told += read.token_ids
    assert told == LETTERS[:3]
    assert read.answer is not None
    answer = read_answer(*read.answer, "", lambda spans, label, tokens: np.zeros(tokens, np.int32))
    assert (answer.output_ids.tolist(), answer.text) == (LETTERS, "éab")


def test_events_of_a_server_that_does_not_pack_are_read_too() -> None:
    events = [so_far(LETTERS[:1]), so_far(LETTERS[:3]), reply(LETTERS)]
    first, second, last = (
        read_event(json.dumps(event).encode(), told, "") for event, told in zip(events, (0, 1, 3), strict=True)
    )
    assert [*first.token_ids, *second.token_ids] == LETTERS[:3]
    assert last.answer is not None
    answer = read_answer(*last.answer, "", lambda spans, label, tokens: np.zeros(tokens, np.int32))
    assert answer.output_ids.tolist() == LETTERS


def test_an_event_that_cannot_be_read_is_the_engines_failure() -> None:
    with pytest.raises(TransientEngineError, match="malformed event of engine-0"):
        read_event(b"{", 0, "engine-0")


def test_only_streams_of_clients_that_ask_for_it_are_packed() -> None:
    assert packed_answers._dump(json.dumps, {"output_ids": [1]}) == '{"output_ids": [1]}'


def so_far(ids: list[int]) -> dict[str, Any]:
    answer = reply(ids)
    answer["meta_info"]["finish_reason"] = None
    return answer
