"""Agents without a network, one per protocol: they hold a conversation as clients of that protocol do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_async.sessions.protocols import chat_completions, messages, responses
from miles_async.sessions.protocols.exchange import Exchange, History, Surroundings
from miles_async.trajectory.context import Turn
from miles_async.trajectory.messages import KeepImage, Message, no_images
from miles_async.trajectory.replies import extends
from miles_async.trajectory.streamed import StreamedTurn
from miles_async.trajectory.tree import Trajectory
from miles_async.types import Generation, JsonObject


@dataclass
class Client:
    """A conversation. ``items``: as the protocol has them."""

    tools: Sequence[JsonObject] = ()  # as chat completions have them
    items: list[Any] = field(default_factory=list)
    asked: int = 0
    history: History = field(default_factory=History)
    streams: bool = False

    def exchange(self, appended: Sequence[JsonObject], keep_image: KeepImage = no_images) -> Exchange:
        """Append messages, which are those of chat completions, and ask for the model's turn."""
        self.asked += 1
        self.append(appended)
        around = Surroundings(answer_id=f"{self.asked}", decode=str, history=self.history, keep_image=keep_image)
        return self.read(json.dumps({**self.body(), "stream": self.streams}).encode(), around)

    def take(self, trajectory: Trajectory, exchange: Exchange, sampled: Generation, pieces: Sequence[int] = ()) -> Turn:
        """``pieces``: numbers of tokens that are streamed at once, one after the other."""
        request = exchange.turn
        context = trajectory.extend(request.messages, request.tools, request.options)
        reads = {"stops": request.stops, "parallel_calls": request.parallel_calls}
        shown, events = None, b""
        if exchange.writer is not None:
            streamed = StreamedTurn(lambda: None)
            streamed.begin(trajectory.parser, context, **reads)
            for reply in self._shown(streamed, sampled.output_ids.tolist(), pieces):
                events += exchange.writer.wrote(0, reply)
            shown = streamed.end()
        turn = trajectory.add(context, sampled, shown=shown, **reads)
        if shown is not None:
            assert extends(turn.reply, shown)
            check_events(events + exchange.writer.ended([turn]), turn.reply)
        self.receive(json.loads(json.dumps(exchange.answer([turn]))))
        return turn

    def _shown(self, streamed: StreamedTurn, token_ids: Sequence[int], pieces: Sequence[int]) -> Iterator[Message]:
        at = 0
        for count in pieces:
            streamed(at, token_ids[at : at + count])
            at = min(at + count, len(token_ids))
            before = streamed.shown
            if (reply := streamed.advance()) is not None:
                assert extends(reply, before)
                yield reply

    def read(self, body: bytes, around: Surroundings) -> Exchange:
        raise NotImplementedError

    def append(self, appended: Sequence[JsonObject]) -> None:
        self.items += appended

    def body(self) -> JsonObject:
        raise NotImplementedError

    def receive(self, answer: Any) -> None:
        raise NotImplementedError


class ChatClient(Client):
    def read(self, body: bytes, around: Surroundings) -> Exchange:
        return chat_completions.read(body, around)

    def body(self) -> JsonObject:
        return {"messages": self.items, "tools": self.tools}

    def receive(self, answer: Any) -> None:
        self.items.append(answer["choices"][0]["message"])


def blocks_of(parts: Sequence[JsonObject]) -> list[JsonObject]:
    """Parts of chat completions as Anthropic has them."""
    return [part if part["type"] == "text" else _image_block(part["image_url"]["url"]) for part in parts]


def _image_block(url: str) -> JsonObject:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _inputs(content: Any) -> Any:
    """A content of chat completions as Responses have it."""
    if isinstance(content, str):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in content
    ]


class MessagesClient(Client):
    def read(self, body: bytes, around: Surroundings) -> Exchange:
        return messages.read(body, around)

    def append(self, appended: Sequence[JsonObject]) -> None:
        """Results of tools and what the user says next are one message."""
        for message in appended:
            match message:
                case {"role": "tool"}:
                    call, result = message["tool_call_id"], message["content"]
                    if isinstance(result, list):
                        result = blocks_of(result)
                    blocks = [{"type": "tool_result", "tool_use_id": call, "content": result}]
                case {"role": "user", "content": list(parts)}:
                    blocks = blocks_of(parts)
                case {"role": "user"}:
                    blocks = [{"type": "text", "text": message["content"]}]
                case _:
                    self.items.append(message)
                    continue
            if self.items and self.items[-1]["role"] == "user":
                self.items[-1]["content"] += blocks
            else:
                self.items.append({"role": "user", "content": blocks})

    def body(self) -> JsonObject:
        functions = [dict(tool["function"]) for tool in self.tools]
        tools = [{"input_schema": function.pop("parameters"), **function} for function in functions]
        return {"messages": self.items, "tools": tools, "max_tokens": 500}

    def receive(self, answer: Any) -> None:
        self.items.append({"role": "assistant", "content": answer["content"]})


class ResponsesClient(Client):
    def read(self, body: bytes, around: Surroundings) -> Exchange:
        return responses.read(body, around)

    def append(self, appended: Sequence[JsonObject]) -> None:
        self.items += [
            {"type": "function_call_output", "call_id": message["tool_call_id"], "output": _inputs(message["content"])}
            if message["role"] == "tool"
            else {**message, "content": _inputs(message["content"])}
            for message in appended
        ]

    def body(self) -> JsonObject:
        return {"input": self.items, "tools": [{"type": "function", **tool["function"]} for tool in self.tools]}

    def receive(self, answer: Any) -> None:
        self.items += answer["output"]


class StatefulResponsesClient(ResponsesClient):
    """It sends what is new, and the id of the response before."""

    previous: str | None = None

    def body(self) -> JsonObject:
        return {**super().body(), "previous_response_id": self.previous}

    def receive(self, answer: Any) -> None:
        self.items.clear()
        self.previous = answer["id"]


CLIENTS: dict[str, type[Client]] = {
    "chat completions": ChatClient,
    "messages": MessagesClient,
    "responses": ResponsesClient,
    "responses, stateful": StatefulResponsesClient,
}

PATHS = {"chat completions": "chat/completions", "messages": "messages"}
"""Below the base URL; the others' is responses."""


def parts_of(event: Any) -> dict[str, str]:
    """What an event adds to reasoning, content, and arguments of calls, in any protocol."""
    kind, delta = event.get("type"), event.get("delta")
    match event:
        case {"choices": [{"delta": new}]}:
            call = "".join(call["function"]["arguments"] for call in new.get("tool_calls", ()))
            found = {"reasoning": new.get("reasoning_content"), "content": new.get("content"), "call": call}
        case {"delta": {"type": _}}:
            found = {
                "reasoning": delta.get("thinking"),
                "content": delta.get("text"),
                "call": delta.get("partial_json"),
            }
        case {"delta": str()}:
            names = {"response.reasoning_text.delta": "reasoning", "response.output_text.delta": "content"}
            found = {names.get(kind, "call"): delta}
        case _:
            found = {}
    return {name: text for name, text in found.items() if text}


def joined(events: Iterable[JsonObject]) -> dict[str, str]:
    """Reasoning, content and arguments of calls that the events of a stream have."""
    texts: dict[str, str] = {}
    for event in events:
        for name, text in parts_of(event).items():
            texts[name] = texts.get(name, "") + text
    return texts


def check_events(events: bytes, reply: Message) -> None:
    """Check that a stream has all of a reply, and nothing else."""
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n") if line.startswith(b"data: {")]
    found = joined(map(json.loads, lines))
    assert found.get("content", "") == reply["content"]
    assert found.get("reasoning", "") == reply.get("reasoning_content", "")
    assert bool(found.get("call")) == bool(reply.get("tool_calls"))
