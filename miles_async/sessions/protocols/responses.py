"""OpenAI's Responses API: answers, streamed or whole. Requests are read in ``responses_request.py``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_async.sessions.protocols.exchange import Delta, Exchange, History, Kept, Progress, Surroundings, sse
from miles_async.sessions.protocols.responses_request import FREE_TEXT, ResponsesRequest, read_request
from miles_async.trajectory.context import Turn
from miles_async.trajectory.messages import Message, arguments_text
from miles_async.types import JsonObject


def read(body: bytes, around: Surroundings) -> Exchange:
    """Read a request. Raises TrajectoryError if it is malformed or asks for something unsupported."""
    request = read_request(body)
    before: Sequence[JsonObject] = ()
    if (previous := request.previous_response_id) is not None:
        before = around.history.conversation(previous, "previous_response_id").messages
    answer = Answer(request, f"resp_{around.answer_id}", int(time.time()), around.history)
    return Exchange(
        turn=request.turn(before, around),
        answer=answer.whole,
        writer=_ResponseWriter(answer) if request.stream else None,
    )


NOTHING = Delta("content")  # what a model says that ends its turn at once


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the parts that it is made of."""

    request: ResponsesRequest
    response_id: str
    created: int  # seconds since 1970
    history: History = field(default_factory=History)  # gets what later requests need of the answer

    def whole(self, turns: Sequence[Turn]) -> JsonObject:
        (turn,) = turns
        if self.request.store is not False:
            instructions = 1 if self.request.instructions else 0
            self.history.conversations[self.response_id] = Kept(turn=turn, skipped=instructions)
        response = self.begun("incomplete" if turn.sampled.finish_reason == "length" else "completed")
        return {**response, "output": self.items(turn.reply), "usage": _usage(turn)}

    def begun(self, status: str) -> JsonObject:
        """A response without output."""
        request = self.request
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": None,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": None,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "usage": None,
        }

    def items(self, reply: Message) -> list[JsonObject]:
        """Output items that are complete. A message if the model said nothing: clients send items again, and none would
        be no turn.
        """
        return [self.item(part, "completed") for part in [*Progress().advance(reply)] or [NOTHING]]

    def item(self, part: Delta, status: str) -> JsonObject:
        """An output item; without content unless it is completed."""
        done = status == "completed"
        if part.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": part.text}] if done else []
            return {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status}
        if part.kind == "content":
            message = {"id": self._id("msg"), "type": "message", "role": "assistant", "status": status}
            return {**message, "content": [_output_text(part.text)] if done else []}
        name, text = part.call["function"]["name"], self.written(part.call) if done else ""
        call = {"id": self._id(f"fc{part.number}"), "call_id": part.call["id"], "name": name, "status": status}
        if self.is_free(part.call):
            return {**call, "type": "custom_tool_call", "input": text}
        if name in self.request.namespaces:
            call["namespace"] = self.request.namespaces[name]
        return {**call, "type": "function_call", "arguments": text}

    def is_free(self, call: JsonObject) -> bool:
        """Whether a call is one of a custom tool."""
        return call["function"]["name"] in self.request.free_text_tools

    def written(self, call: JsonObject) -> str:
        """The model's text for the arguments of a call, or for a custom tool, whose other arguments are remembered."""
        arguments = call["function"]["arguments"]
        if self.is_free(call):
            if isinstance(arguments, dict) and [*arguments] == [FREE_TEXT] and isinstance(arguments[FREE_TEXT], str):
                return arguments[FREE_TEXT]
            self.history.odd_inputs.add((call["id"], arguments_text(call)))
        return arguments_text(call)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self.response_id.removeprefix('resp_')}"


class _ResponseWriter:
    """Writes events: an item is opened when it begins, and closed when the next one does."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._progress = Progress()
        self._open: Delta | None = None  # the item that is open, with its text so far
        self._items = 0
        self._events = 0

    def opened(self) -> bytes:
        response = self._answer.begun("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def waits(self) -> bytes:
        return self._event("response.in_progress", response=self._answer.begun("in_progress"))

    def wrote(self, index: int, reply: Message) -> bytes:
        return b"".join(map(self._part, self._progress.advance(reply)))

    def ended(self, turns: Sequence[Turn]) -> bytes:
        rest = self.wrote(0, turns[0].reply)
        if self._open is None:
            rest += self._part(NOTHING)
        rest += self._close()
        response = self._answer.whole(turns)
        return rest + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: JsonObject) -> bytes:
        details = error["error"]  # clients look for it, next to what the API has
        code, message = details["code"], details["message"]
        return self._event("error", code=code, message=message, param=None, error=details)

    def _part(self, part: Delta) -> bytes:
        begun = b""
        if self._open is None or self._open.kind != part.kind or part.kind == "call":
            begun = self._close() + self._begin(part)
        so_far = "" if self._open is None else self._open.text
        self._open = Delta(part.kind, so_far + part.text, part.number, part.call)
        text = self._answer.written(part.call) if part.kind == "call" else part.text
        return begun + self._item_event(f"{self._name(part)}.delta", part, delta=text)

    def _begin(self, part: Delta) -> bytes:
        item = self._answer.item(part, "in_progress")
        added = self._event("response.output_item.added", output_index=self._items, item=item)
        if part.kind == "call":
            return added
        return added + self._item_event("content_part.added", part, part=self._content(part.kind, ""))

    def _close(self) -> bytes:
        part = self._open
        if part is None:
            return b""
        if part.kind == "call":
            field = "input" if self._answer.is_free(part.call) else "arguments"
            done = self._item_event(f"{self._name(part)}.done", part, **{field: self._answer.written(part.call)})
        else:
            done = self._item_event(f"{self._name(part)}.done", part, text=part.text)
            done += self._item_event("content_part.done", part, part=self._content(part.kind, part.text))
        item = self._answer.item(part, "completed")
        done += self._event("response.output_item.done", output_index=self._items, item=item)
        self._open = None
        self._items += 1
        return done

    def _name(self, part: Delta) -> str:
        """Names of a part's events."""
        if part.kind != "call":
            return {"reasoning": "reasoning_text", "content": "output_text"}[part.kind]
        return "custom_tool_call_input" if self._answer.is_free(part.call) else "function_call_arguments"

    def _content(self, kind: str, text: str) -> JsonObject:
        return _output_text(text) if kind == "content" else {"type": "reasoning_text", "text": text}

    def _item_event(self, kind: str, delta: Delta, /, **fields: object) -> bytes:
        where = {"item_id": self._answer.item(delta, "in_progress")["id"], "output_index": self._items}
        if delta.kind != "call":
            where["content_index"] = 0
        if kind.startswith("output_text"):
            where["logprobs"] = []
        return self._event(f"response.{kind}", **where, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        number = self._events
        self._events += 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)


def _output_text(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(turn: Turn) -> JsonObject:
    prompt, said = turn.context.length, len(turn.sampled.output_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": min(turn.sampled.cached_tokens, prompt)},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart
        "total_tokens": prompt + said,
    }
