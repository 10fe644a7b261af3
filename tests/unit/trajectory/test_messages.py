"""Messages of models that write what JSON, msgpack or UTF-8 cannot have."""

from __future__ import annotations

import msgspec
import pytest

from miles_async.engines.sglang.reply_parsers import _arguments
from miles_async.runtime.nesting import storable
from miles_async.trajectory.messages import Message, as_sent, canonical
from miles_async.types import JsonObject

DEEP = '{"a": ' + "[" * 60 + "]" * 60 + "}"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'{"text": "\ud83d"}', {"text": "?"}),
        (r'{"text": "\ud83d\ude00 \u00e9"}', {"text": "😀 é"}),
        (r'{"\uDE00": ["\uD83D"]}', {"?": ["?"]}),
        ('{"query": 1', '{"query": 1'),
        (DEEP, DEEP),
    ],
)
def test_arguments_can_be_sent_and_saved(written: str, read: object) -> None:
    assert _arguments(written) == read
    msgspec.json.encode(read)


def test_integers_beyond_64_bits_are_stored_as_texts() -> None:
    values: JsonObject = {"a": [1 << 64, -(1 << 63) - 1], "b": {"c": (1 << 64) - 1, "d": True}, "e": "x", "f": None}
    assert storable(values) == {**values, "a": [str(1 << 64), str(-(1 << 63) - 1)]}
    msgspec.msgpack.encode(storable(values))


@pytest.mark.parametrize("arguments", ['{"query": 1}', "null", "3", "", "not JSON", {"query": "1"}])
def test_a_reply_that_is_given_back_is_what_the_model_wrote(arguments: object) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": arguments}}
    reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert canonical(as_sent(reply)) == reply
