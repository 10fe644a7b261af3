"""Answers of SGLang to requests for log-probs of given tokens, as arrays.

They come as JSON or, from engines that we launch, *packed* as msgpack with 4 bytes per token and no Python object for
any of them, like answers to generation requests (``answers.py``). Both give the same float32 log-probs, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from miles_async.engines.http import ERROR_TEXT
from miles_async.errors import EngineError
from miles_async.types import CanaryScore, Float32

PACK_SCORES = "packed_scores"  # field of a request: true asks for the packed form
_LOGPROBS = np.dtype("<f4")
_JSON_BEGINS = b"{"  # no map of msgpack with so few fields begins with this byte


class _Packed(msgspec.Struct):
    weight_version: str
    logprobs: bytes  # float32, little-endian; NaN for null


class _PlainMeta(msgspec.Struct):
    weight_version: str
    input_token_logprobs: list[tuple[float | None, int, object]]


class _Plain(msgspec.Struct):
    meta_info: _PlainMeta
    output_ids: list[int] = []


_packed_decoder = msgspec.msgpack.Decoder(_Packed)
_plain_decoder = msgspec.json.Decoder(_Plain)


def read_scores(body: bytes, count: int, source: str) -> CanaryScore:
    """Parse and check an answer of either form, of which the last ``count`` log-probs were asked for.

    Raises EngineError for an answer that is cut or malformed, has output tokens, or has other than ``count`` numbers
    after its first entry, which is null where nothing precedes the token.
    """
    try:
        if body.startswith(_JSON_BEGINS):
            plain = _plain_decoder.decode(body)
            if plain.output_ids:
                raise EngineError(
                    f"{source}: expected no output tokens where none were asked for, found {len(plain.output_ids)}: "
                    "the engine puts something in front of its answers, such as the prompt"
                )
            version, logprobs = plain.meta_info.weight_version, _of_entries(plain.meta_info.input_token_logprobs)
        else:
            packed = _packed_decoder.decode(body)
            version, logprobs = packed.weight_version, np.frombuffer(packed.logprobs, _LOGPROBS)
    except ValueError as error:  # msgspec.DecodeError is one
        raise EngineError(f"{source}: unexpected answer ({error}): {body[:ERROR_TEXT]!r}") from error
    found = logprobs[1:]
    if len(found) != count or np.isnan(found).any():
        raise EngineError(
            f"{source}: expected {count} log-probs of given tokens, found {len(found)}, "
            f"{int(np.isnan(found).sum())} of them NaN"
        )
    return CanaryScore(weight_version=version, logprobs=found)


def pack_scores(reply: object) -> bytes | None:
    """The packed form of an answer, already parsed; None if it has no log-probs of given tokens, as an error has, or
    output tokens, which are refused then.
    """
    if not isinstance(reply, dict) or reply.get("output_ids"):
        return None
    meta = reply.get("meta_info", {})
    entries, version = meta.get("input_token_logprobs"), meta.get("weight_version")
    if not entries or version is None:
        return None
    return msgspec.msgpack.encode(_Packed(version, _of_entries(entries).tobytes()))


def _of_entries(entries: Sequence[Sequence[object]]) -> Float32:
    return np.array([entry[0] for entry in entries], _LOGPROBS)  # NaN for None
