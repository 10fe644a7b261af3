"""Agents without a network, one per protocol: they hold a conversation as clients of that protocol do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_async.sessions.protocols import chat_completions, messages, responses
from miles_async.sessions.protocols.exchange import Exchange, Surroundings
from miles_async.trajectory.context import Turn
from miles_async.trajectory.tree import Trajectory
from miles_async.types import Generation, JsonObject


@dataclass
class Client:
    """A conversation. ``items``: as the protocol has them."""

    tools: Sequence[JsonObject] = ()  # as chat completions have them
    items: list[Any] = field(default_factory=list)
    asked: int = 0
    history: dict[str, Any] = field(default_factory=dict)

    def exchange(self, appended: Sequence[JsonObject]) -> Exchange:
        """Append messages, which are those of chat completions, and ask for the model's turn."""
        self.asked += 1
        self.append(appended)
        around = Surroundings(answer_id=f"{self.asked}", decode=str, history=self.history)
        return self.read(json.dumps(self.body()).encode(), around)

    def take(self, trajectory: Trajectory, exchange: Exchange, sampled: Generation) -> Turn:
        request = exchange.turn
        context = trajectory.extend(request.messages, request.tools, request.options)
        turn = trajectory.add(context, sampled, stops=request.stops, parallel_calls=request.parallel_calls)
        self.receive(json.loads(json.dumps(exchange.answer([turn]))))
        return turn

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


class MessagesClient(Client):
    def read(self, body: bytes, around: Surroundings) -> Exchange:
        return messages.read(body, around)

    def append(self, appended: Sequence[JsonObject]) -> None:
        """Results of tools and what the user says next are one message."""
        for message in appended:
            match message:
                case {"role": "tool"}:
                    call, result = message["tool_call_id"], message["content"]
                    block = {"type": "tool_result", "tool_use_id": call, "content": result}
                case {"role": "user"}:
                    block = {"type": "text", "text": message["content"]}
                case _:
                    self.items.append(message)
                    continue
            if self.items and self.items[-1]["role"] == "user":
                self.items[-1]["content"].append(block)
            else:
                self.items.append({"role": "user", "content": [block]})

    def body(self) -> JsonObject:
        tools = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in self.tools
        ]
        return {"messages": self.items, "tools": tools, "max_tokens": 500}

    def receive(self, answer: Any) -> None:
        self.items.append({"role": "assistant", "content": answer["content"]})


class ResponsesClient(Client):
    def read(self, body: bytes, around: Surroundings) -> Exchange:
        return responses.read(body, around)

    def append(self, appended: Sequence[JsonObject]) -> None:
        self.items += [
            {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            if message["role"] == "tool"
            else message
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
