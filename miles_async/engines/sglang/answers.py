"""Answers of SGLang to generation requests, as arrays.

They come in two forms. *Plain* is the JSON that every SGLang server writes, some 40 bytes per token in nested lists.
*Packed* is msgpack that holds token ids and log-probs as arrays, 8 bytes per token and no Python object for any of
them, and the text if it was asked for; engines that we launch send it (``packed_answers.py``) to requests with the
field ``PACK``. Other servers ignore the field. Both forms give the same float32 log-probs, bit for bit, and the same
experts, where requests ask for them: plain as int32 in base64, packed in one or two bytes each.

Each event of a plain stream is a plain answer with everything sampled so far, which takes quadratic time. Where the
packed form is asked for, an event has the new token ids (``NEW_IDS``), and the last one the packed answer in base64
(``PACK``).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable

import msgspec
import numpy as np

from miles_async.engines.http import ERROR_TEXT, http_error
from miles_async.errors import TransientEngineError
from miles_async.seams import TokenVersions
from miles_async.seams.streams import StreamEvent
from miles_async.types import FinishReason, Float32, Generation, Int32, RoutedExperts

PACK = "packed_answer"  # field of a request: true asks for the packed form
DECODER, TEXT_FROM = "packed_decoder", "packed_text_from"  # fields of a request, see ``GenerateRequest``
MEDIA_TYPE = "application/msgpack"  # of a packed answer
NEW_IDS = "packed_new_ids"  # field of an event
_PLAIN_TYPE = "application/json"
_DONE = b"[DONE]"

_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_EXPERTS: dict[int, np.dtype[np.integer]] = {1: np.dtype("u1"), 2: np.dtype("<i2")}  # bytes of each → form when packed
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Finish(msgspec.Struct):
    """Why a generation ended."""

    type: str
    message: str | None = None
    status_code: int | None = None  # of an abort through the request's or the server's fault, in a stream


class Meta(msgspec.Struct):
    """The fields of ``meta_info`` that we read, except the log-probs."""

    finish_reason: Finish
    prompt_tokens: int = 0  # absent where a request was aborted before it had begun
    completion_tokens: int | None = None
    cached_tokens: int = 0
    weight_version: object = None
    weight_versions: object = None


class _Packed(msgspec.Struct):
    meta_info: Meta
    output_ids: bytes  # int32 [T], little-endian
    output_logprobs: bytes  # float32 [T], little-endian; NaN for null
    text: str | None = None
    expert_bytes: int = 0
    routed_experts: bytes | None = None


class _Entry(msgspec.Struct, array_like=True, gc=False):  # cheaper than a tuple: no garbage to look for
    logprob: float | None
    token: int


class _PlainMeta(Meta):
    output_token_logprobs: list[_Entry] = []
    routed_experts: str | None = None


class _Plain(msgspec.Struct):
    output_ids: list[int]
    meta_info: _PlainMeta


_packed_decoder = msgspec.msgpack.Decoder(_Packed)
_plain_decoder = msgspec.json.Decoder(_Plain)


def read_answer(body: bytes, content_type: str, source: str, versions: TokenVersions) -> Generation:
    """Parse and check an answer of either form.

    Args:
        body: the whole body.
        content_type: the header; ``MEDIA_TYPE`` marks the packed form.
        source: URL of the engine, for messages.
        versions: see ``kind.InferenceServer.decode``.

    Raises:
        TransientEngineError: the answer is cut or malformed, has an unknown finish reason, a log-prob that is not
            finite, other than one log-prob per token, or another number of tokens than it says.
        EngineError: a streamed answer is an error (``http.http_error``).
        VersionUnknownError: from ``versions``.
    """
    try:
        read = _read_packed(body) if content_type == MEDIA_TYPE else _read_plain(body, source)
    except (ValueError, OverflowError) as error:  # a token id above int32; msgspec.DecodeError is a ValueError
        raise TransientEngineError(f"cut or malformed answer of {source}: {error}") from error
    meta, output_ids, logprobs, text, experts = read
    if (status := meta.finish_reason.status_code) is not None:
        raise http_error(status, meta.finish_reason.message or "")
    finish_reason = _FINISH_REASONS.get(meta.finish_reason.type)
    if finish_reason is None:
        raise TransientEngineError(f"{source}: finish reason {meta.finish_reason}")
    if len(output_ids) != len(logprobs):
        raise _mismatch(len(output_ids), len(logprobs), source)
    if (count := meta.completion_tokens) is not None and count != len(output_ids):
        raise TransientEngineError(
            f"{source}: expected {count} output tokens (completion_tokens), found {len(output_ids)}"
        )
    if not np.isfinite(logprobs).all():
        raise TransientEngineError(f"{source}: a log-prob is not finite; the engine's numerics are broken")
    return Generation(
        output_ids=output_ids,
        logprobs=logprobs,
        weight_versions=versions(meta.weight_versions, meta.weight_version, len(output_ids)),
        finish_reason=finish_reason,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        text=text,
        routed_experts=experts,
    )


def pack(reply: object, text: str | None = None) -> bytes | None:
    """The packed form of a plain answer, already parsed; None unless it has one log-prob for each of its tokens.

    What cannot be packed is sent plain, and refused by :func:`read_answer`.
    """
    if not isinstance(reply, dict) or "output_token_logprobs" not in reply.get("meta_info", ()):
        return None  # several answers, an error, or a request that was aborted before it had begun
    output_ids, meta = reply["output_ids"], reply["meta_info"]
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != output_ids:
        return None
    logprobs = np.array([entry[0] for entry in entries], _LOGPROBS)
    packed = _Packed(msgspec.convert(meta, Meta), np.array(output_ids, _IDS).tobytes(), logprobs.tobytes(), text)
    if (encoded := meta.get("routed_experts")) is not None:
        experts = _compact(encoded)
        packed.expert_bytes, packed.routed_experts = experts.itemsize, experts.tobytes()
    return msgspec.msgpack.encode(packed)


class _SoFar(msgspec.Struct):
    """The part of an event's ``meta_info`` that we read."""

    finish_reason: Finish | None = None  # None before the last event
    completion_tokens: int | None = None


class _EventError(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Event(msgspec.Struct):
    new_ids: list[int] | None = msgspec.field(default=None, name=NEW_IDS)
    packed: str | None = msgspec.field(default=None, name=PACK)
    output_ids: list[int] = []
    meta_info: _SoFar | None = None
    error: _EventError | None = None


_event_decoder = msgspec.json.Decoder(_Event)


def read_event(data: bytes, before: int, source: str) -> StreamEvent:
    """See ``seams.streams.StreamingServer``. Reads events of either form."""
    if data == _DONE:
        return StreamEvent()
    try:
        event = _event_decoder.decode(data)
        if event.packed is not None:
            return StreamEvent(answer=(b64decode(event.packed, validate=True), MEDIA_TYPE))
    except ValueError as error:
        raise TransientEngineError(f"malformed event of {source}: {error}") from error
    if event.error is not None:
        raise http_error(event.error.code, event.error.message)
    if event.new_ids is not None:
        return StreamEvent(event.new_ids)
    if event.meta_info is None:
        raise TransientEngineError(f"malformed event of {source}: expected meta_info, found {data[:ERROR_TEXT]!r}")
    if (count := event.meta_info.completion_tokens) is not None and count > len(event.output_ids):
        raise TransientEngineError(
            f"{source}: an event has {len(event.output_ids)} of {count} tokens: expected an engine that sends all of "
            "them each time; start it without --incremental-streaming-output"
        )
    if event.meta_info.finish_reason is not None:
        return StreamEvent(answer=(data, _PLAIN_TYPE))
    return StreamEvent(event.output_ids[before:])


class EventPacker:
    """Packs the events of one stream. Each has everything sampled so far."""

    def __init__(self, pack_answer: Callable[[object], bytes | None]) -> None:
        """``pack_answer``: packs the last event; see :func:`pack`."""
        self._pack_answer = pack_answer
        self._sent = 0

    def __call__(self, reply: object) -> object:
        """Return the event to send: ``reply`` itself if it cannot be packed."""
        if not isinstance(reply, dict) or "output_ids" not in reply:
            return reply
        if reply["meta_info"].get("finish_reason") is not None:
            packed = self._pack_answer(reply)
            return reply if packed is None else {PACK: b64encode(packed).decode()}
        new = reply["output_ids"][self._sent :]
        self._sent += len(new)
        return {NEW_IDS: new}


_Read = tuple[Meta, Int32, Float32, str | None, RoutedExperts | None]


def _read_packed(body: bytes) -> _Read:
    packed = _packed_decoder.decode(body)
    experts = None
    if packed.routed_experts is not None:
        experts = np.frombuffer(packed.routed_experts, _EXPERTS[packed.expert_bytes])
    output_ids, logprobs = np.frombuffer(packed.output_ids, _IDS), np.frombuffer(packed.output_logprobs, _LOGPROBS)
    return packed.meta_info, output_ids, logprobs, packed.text, experts


def _read_plain(body: bytes, source: str) -> _Read:
    plain = _plain_decoder.decode(body)
    entries = plain.meta_info.output_token_logprobs
    if [entry.token for entry in entries] != plain.output_ids:
        raise _mismatch(len(plain.output_ids), len(entries), source)
    # float32 makes NaN of SGLang's null, which was not a number.
    logprobs = np.array([entry.logprob for entry in entries], np.float32)
    experts = None if plain.meta_info.routed_experts is None else _compact(plain.meta_info.routed_experts)
    return plain.meta_info, np.array(plain.output_ids, np.int32), logprobs, None, experts


def _compact(encoded: str) -> RoutedExperts:
    """Experts as SGLang writes them, in one byte each if that holds all of them. -1 stands for no expert."""
    experts = np.frombuffer(b64decode(encoded, validate=True), _IDS)
    few = not len(experts) or (experts.min() >= 0 and experts.max() <= 255)
    return experts.astype(_EXPERTS[1 if few else 2])


def _mismatch(tokens: int, logprobs: int, source: str) -> TransientEngineError:
    return TransientEngineError(
        f"{source}: expected one log-prob for each of {tokens} output tokens, "
        f"found {logprobs}{' of other tokens' if logprobs == tokens else ''}"
    )
