"""Anthropic's Messages API: answers, streamed or whole. Requests are read in ``messages_request.py``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from miles_async.sessions.protocols.exchange import Delta, Exchange, History, Kept, Progress, Surroundings, sse
from miles_async.sessions.protocols.messages_request import UNPARSED, MessagesRequest, read_counted, read_request
from miles_async.trajectory.context import Turn
from miles_async.trajectory.messages import Message
from miles_async.trajectory.taker import TurnRequest
from miles_async.types import JsonObject

_SIGNATURE = "miles_async"  # clients want one at each thinking block, and check nothing


def read(body: bytes, around: Surroundings) -> Exchange:
    """Read a request. Raises TrajectoryError if it is malformed or asks for something unsupported."""
    request = read_request(body)
    before = _continued(request, around)
    answer = _Answer(request, f"msg_{around.answer_id}", request.offered(before), around.history)
    return Exchange(
        turn=request.turn(before, around),
        answer=answer.whole,
        writer=_MessageWriter(answer) if request.stream else None,
    )


def read_count(body: bytes, around: Surroundings) -> TurnRequest:
    """Read a request for the tokens of a conversation. Raises TrajectoryError as :func:`read` does."""
    request = read_counted(body)
    return request.turn(_continued(request, around), around)


def _continued(request: MessagesRequest, around: Surroundings) -> Kept | None:
    message_id, name = request.continued, "thread.previous_message_id"
    return None if message_id is None else around.history.conversation(message_id, name)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer, and the parts that it is made of."""

    request: MessagesRequest
    message_id: str
    tools: Sequence[JsonObject]  # that requests which continue it have
    history: History  # gets it, if the request asks for that

    def whole(self, turns: Sequence[Turn]) -> JsonObject:
        (turn,) = turns
        content: list[JsonObject] = []
        for part in Progress().advance(turn.reply):
            match part.kind:
                case "reasoning":
                    content.append({"type": "thinking", "thinking": part.text, "signature": _SIGNATURE})
                case "content":
                    content.append({"type": "text", "text": part.text})
                case "call":
                    content.append({**_tool_use(part.call), "input": _input(part.call)})
        return {**self.head(), "content": content, **self.ended(turn), "usage": _usage(turn)}

    def head(self) -> JsonObject:
        return {"id": self.message_id, "type": "message", "role": "assistant", "model": self.request.model}

    def ended(self, turn: Turn) -> JsonObject:
        """Keep the conversation if that is asked for; return why the turn ended."""
        if self.request.thread is not None:
            self.history.conversations[self.message_id] = Kept(turn=turn, tools=self.tools)
        reason, stop = "end_turn", None
        if turn.sampled.finish_reason == "length":
            reason = "max_tokens"
        elif turn.reply.get("tool_calls"):
            reason = "tool_use"
        elif found := {at: stop for stop in self.request.stops if (at := turn.text.find(stop)) >= 0}:
            reason, stop = "stop_sequence", found[min(found)]
        return {"stop_reason": reason, "stop_sequence": stop}


class _MessageWriter:
    """Writes events: a block is opened when it begins, and closed when the next one does."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._progress = Progress()
        self._open: str | None = None  # kind of the block that is open
        self._blocks = 0

    def opened(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
        message = {**self._answer.head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def waits(self) -> bytes:
        return _event("ping")

    def wrote(self, index: int, reply: Message) -> bytes:
        return b"".join(map(self._part, self._progress.advance(reply)))

    def ended(self, turns: Sequence[Turn]) -> bytes:
        (turn,) = turns
        return (
            self.wrote(0, turn.reply)
            + self._close()
            + _event("message_delta", delta=self._answer.ended(turn), usage=_usage(turn))
            + _event("message_stop")
        )

    def failed(self, error: JsonObject) -> bytes:
        return sse(error, "error")

    def _part(self, part: Delta) -> bytes:
        match part.kind:
            case "reasoning":
                opened = self._begin("reasoning", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta("thinking_delta", thinking=part.text)
            case "content":
                opened = self._begin("content", {"type": "text", "text": ""})
                return opened + self._delta("text_delta", text=part.text)
            case "call":
                opened = self._begin(f"call {part.number}", {**_tool_use(part.call), "input": {}})
                text = json.dumps(_input(part.call), ensure_ascii=False)
                return opened + self._delta("input_json_delta", partial_json=text)

    def _begin(self, kind: str, block: JsonObject) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        return closed + _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, kind: str, **fields: object) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta("signature_delta", signature=_SIGNATURE) if self._open == "reasoning" else b""
        closed = signed + _event("content_block_stop", index=self._blocks)
        self._open = None
        self._blocks += 1
        return closed


def _event(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _tool_use(call: JsonObject) -> JsonObject:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _input(call: JsonObject) -> JsonObject:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, dict) else {UNPARSED: arguments}


def _usage(turn: Turn) -> JsonObject:
    prompt = turn.context.length
    cached = min(turn.sampled.cached_tokens, prompt)  # of all engines that the turn was at
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(turn.sampled.output_ids),
    }
