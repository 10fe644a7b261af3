"""Answers of engines: both forms give the same arrays, and what is cut or does not fit is an error. # covers: C12"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.engines.sglang.answers import MEDIA_TYPE, pack, read_answer
from miles_async.errors import TransientEngineError
from miles_async.types import Generation, Int32
from tests.json_dict import JsonDict

JSON = "application/json"
URL = "http://engine"

token_ids = st.integers(0, 2**31 - 1)
# What a scheduler sends is float32; other clients of the protocol may send any double.
logprobs = st.floats(-(2.0**100), 0.0, width=32) | st.floats(-(2.0**100), 0.0)


@st.composite
def replies(draw: st.DrawFn) -> JsonDict:
    """An answer as SGLang has it before it is written."""
    tokens = draw(st.lists(st.tuples(token_ids, logprobs), max_size=40))
    experts = draw(st.none() | st.lists(st.integers(-1, 400), max_size=20) | st.lists(st.integers(0, 255)))
    encoded = None if experts is None else b64encode(np.array(experts, np.int32)).decode()
    return {
        "text": draw(st.text(max_size=10)),
        "output_ids": [token for token, _ in tokens],
        "meta_info": {
            "id": "a",
            "finish_reason": draw(st.sampled_from([{"type": "stop", "matched": 7}, {"type": "length", "length": 3}])),
            "prompt_tokens": draw(st.integers(0, 10**6)),
            "completion_tokens": len(tokens),
            "weight_version": draw(st.sampled_from(["3", "default"])),
            "weight_versions": draw(st.sampled_from([None, [{"version": "3", "start": 0, "end": len(tokens)}]])),
            "output_token_logprobs": [(logprob, token, None) for token, logprob in tokens],
            **({} if encoded is None else {"routed_experts": encoded}),
        },
    }


def versions(spans: object, label: object, tokens: int) -> Int32:
    """Stands for what was reported, whatever it is."""
    return np.full(tokens, zlib.crc32(repr((spans, label)).encode()) >> 1, np.int32)


def both_forms(reply: JsonDict) -> list[tuple[bytes, str]]:
    packed = pack(reply)
    assert packed is not None
    return [(json.dumps(reply).encode(), JSON), (packed, MEDIA_TYPE)]


def contents(answer: Generation) -> JsonDict:
    fields = msgspec.structs.asdict(answer)
    return {name: (v.dtype.str, v.tobytes()) if isinstance(v, np.ndarray) else v for name, v in fields.items()}


@given(replies())
def test_both_forms_are_the_same_to_the_last_bit(reply: JsonDict) -> None:
    plain, packed = (contents(read_answer(*form, URL, versions)) for form in both_forms(reply))
    assert packed == plain
    expected = np.array([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]], np.float32)
    assert packed["logprobs"] == ("<f4", expected.tobytes())
    assert packed["output_ids"] == ("<i4", np.array(reply["output_ids"], np.int32).tobytes())


@given(replies(), st.text())
def test_a_packed_text_is_read_as_it_is(reply: JsonDict, text: str) -> None:
    packed = pack(reply, text)
    assert packed is not None
    assert read_answer(packed, MEDIA_TYPE, URL, versions).text == text


@given(replies())
def test_experts_come_in_as_few_bytes_as_hold_them(reply: JsonDict) -> None:  # covers: M19
    encoded = reply["meta_info"].get("routed_experts")
    for body, content_type in both_forms(reply):
        found = read_answer(body, content_type, URL, versions).routed_experts
        if encoded is None:
            assert found is None
            continue
        expected = np.frombuffer(b64decode(encoded), np.int32).tolist()
        assert found.tolist() == expected
        assert found.itemsize == (1 if all(0 <= expert < 256 for expert in expected) else 2)


@given(replies(), st.data())
def test_an_answer_that_is_cut_anywhere_is_an_error(reply: JsonDict, data: st.DataObject) -> None:
    for body, content_type in both_forms(reply):
        end = data.draw(st.integers(0, len(body) - 1))
        with pytest.raises(TransientEngineError, match="cut or malformed answer of http://engine"):
            read_answer(body[:end], content_type, URL, versions)


@given(replies().filter(lambda reply: reply["output_ids"]), st.sampled_from([None, float("nan"), float("-inf")]))
def test_a_log_prob_that_is_not_finite_is_an_error(reply: JsonDict, broken: float | None) -> None:
    entries = reply["meta_info"]["output_token_logprobs"]
    entries[-1] = (broken, *entries[-1][1:])
    (plain, packed) = both_forms(reply)
    with pytest.raises(TransientEngineError, match="a log-prob is not finite"):
        read_answer(*packed, URL, versions)
    if broken is None:  # JSON has no other
        with pytest.raises(TransientEngineError, match="a log-prob is not finite"):
            read_answer(*plain, URL, versions)


@given(replies().filter(lambda reply: reply["output_ids"]), st.sampled_from(["fewer", "more", "other"]))
def test_log_probs_of_other_tokens_are_an_error_and_never_packed(reply: JsonDict, how: str) -> None:
    entries = reply["meta_info"]["output_token_logprobs"]
    match how:
        case "fewer":
            entries.pop()
        case "more":
            entries.append((-0.5, 1, None))
        case "other":
            entries[0] = (entries[0][0], entries[0][1] ^ 1, None)
    assert pack(reply) is None
    with pytest.raises(TransientEngineError, match="expected one log-prob for each of"):
        read_answer(json.dumps(reply).encode(), JSON, URL, versions)


@given(replies().filter(lambda reply: reply["output_ids"]), st.sampled_from(["output_ids", "output_logprobs"]))
def test_packed_arrays_of_another_length_are_an_error(reply: JsonDict, name: str) -> None:
    packed = msgspec.msgpack.decode(pack(reply) or b"")
    for cut, message in ((4, "expected one log-prob for each of"), (1, "cut or malformed")):
        body = msgspec.msgpack.encode(packed | {name: packed[name][:-cut]})
        with pytest.raises(TransientEngineError, match=message):
            read_answer(body, MEDIA_TYPE, URL, versions)


@given(replies())
def test_an_unknown_finish_reason_is_an_error(reply: JsonDict) -> None:
    reply["meta_info"]["finish_reason"] = {"type": "tired"}
    for body, content_type in both_forms(reply):
        with pytest.raises(TransientEngineError, match="finish reason"):
            read_answer(body, content_type, URL, versions)


@pytest.mark.parametrize("content", [[], {"error": "no"}, {"output_ids": [], "meta_info": {"id": "a"}}])
def test_bodies_other_than_one_answer_with_log_probs_stay_as_they_are(content: object) -> None:
    assert pack(content) is None
