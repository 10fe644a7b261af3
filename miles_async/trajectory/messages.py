"""The canonical form of messages of prompt files and agents, in which they are compared and rendered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from miles_async.errors import TrajectoryError
from miles_async.types import JsonObject

Message = JsonObject

_ROLES = ("system", "developer", "user", "assistant", "tool")

KeepImage = Callable[[str], str]
"""Keeps an image for a conversation: its ``data:`` URL → its digest. Raises TrajectoryError."""


def no_images(url: str) -> str:
    """The ``KeepImage`` of a model that reads no images."""
    raise TrajectoryError("expected messages without images: the model (--hf-checkpoint) reads none")


def with_kept_images(message: object, keep: KeepImage) -> object:
    """A message whose ``image_url`` parts are kept images: ``{"type": "image", "image": digest}``.

    Raises TrajectoryError.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(content, list):
        return message
    return {**message, "content": [_kept(part, keep) for part in content]}


def _kept(part: object, keep: KeepImage) -> object:
    match part:
        case {"type": "image_url", "image_url": str(url) | {"url": str(url)}}:
            return {"type": "image", "image": keep(url)}
    return part


def canonical(message: object) -> Message:
    """Return role, content, and other fields that a chat template may render; drop the rest.

    The content is a text, or with images a list of parts, each a text or ``{"type": "image", "image": digest}``.
    Arguments of tool calls, which clients send as JSON texts, become objects: that is what templates expect.
    Raises TrajectoryError.

    >>> canonical({"role": "user", "content": [{"type": "text", "text": "rev 12"}], "refusal": None})
    {'role': 'user', 'content': 'rev 12'}
    """
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise TrajectoryError(f"expected a message with a role ({', '.join(_ROLES)}), found {_shown(message)}")
    parts = _parts(message.get("content")) if message["role"] != "assistant" else None
    return _known_fields(message, None if parts is None else [*_joined(parts)])


def _known_fields(message: JsonObject, parts: list[Message] | None) -> Message:
    """``parts``: content with images, see :func:`_parts`."""
    result: dict[str, object] = {"role": message["role"], "content": _text(message) if parts is None else parts}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        result["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise TrajectoryError(f"expected a list of tool calls, found {_shown(calls)}")
        result["tool_calls"] = [_tool_call(call) for call in calls]
    result.update({key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None})
    return result


def from_data(message: object) -> Message:
    """Return the canonical form of a message of a prompt file, plus other fields that are not null: some templates
    render them. Any role is left to the template.

    Stricter than with agents, whose model may have written anything: content is null only next to reasoning or tool
    calls, and arguments are objects. Raises TrajectoryError.

    >>> from_data({"role": "user", "content": "rev 12", "tool_calls": None})
    {'role': 'user', 'content': 'rev 12'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TrajectoryError(f"expected a message, an object with the texts role and content; found {_shown(message)}")
    known = _known_fields(message, _parts(message.get("content")))
    calls = known.get("tool_calls", ())
    if message.get("content") is None and not calls and "reasoning_content" not in known:
        raise TrajectoryError(f"expected content, or tool calls of the assistant; found {_shown(message)}")
    for call in calls:
        if not isinstance(call["function"]["arguments"], Mapping):
            raise TrajectoryError(f"expected the arguments of a tool call to be an object; found {_shown(call)}")
    others = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    return {**others, **known}


def arguments_text(call: JsonObject) -> str:
    """Arguments of a call as text, from which :func:`canonical` reads them: JSON, or what the model wrote if that
    isn't.
    """
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) and arguments and not _is_json(arguments):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def with_text_arguments(call: JsonObject) -> JsonObject:
    """A call with its arguments as text, as chat completions have it."""
    return {**call, "function": {**call["function"], "arguments": arguments_text(call)}}


def as_sent(reply: Message) -> JsonObject:
    """A reply as a client would send it back."""
    calls = [with_text_arguments(call) for call in reply.get("tool_calls", ())]
    return {**reply, "tool_calls": calls} if calls else reply


def is_echo(sent: Message, reply: Message) -> bool:
    """Return whether a message is the model's reply given back. Agents may drop reasoning and white space around the
    content, and add a name.
    """
    return _echoed(sent, sent) == _echoed(reply, sent)


def _echoed(message: Message, sent: Message) -> Message:
    ignored = {"name"} if "reasoning_content" in sent else {"name", "reasoning_content"}
    kept = {key: value for key, value in message.items() if key not in ignored}
    content = message["content"]
    return {**kept, "content": content.strip() if isinstance(content, str) else content}


def text_of(message: Message) -> str:
    """The content as a person reads it, with ``<image>`` where an image is.

    >>> text_of({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]})
    '<image>How many?'
    """
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)


def _parts(content: object) -> list[Message] | None:
    """Parts of a content with images, each a text or of type image; None for a content without images."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return None
    others = [part for part in content if not _is_image(part)]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in others):
        raise TrajectoryError(f"expected parts of type text or image as content; found {_shown(content)}")
    return list(content)


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _joined(parts: list[Message]) -> Iterator[Message]:
    """The parts with one text between two images."""
    text = ""
    for part in [*parts, None]:
        if part is not None and not _is_image(part):
            text += part["text"]
            continue
        if text:
            yield {"type": "text", "text": text}
        if part is not None:
            yield {"type": "image", "image": str(part.get("image"))}
        text = ""


def images_of(message: Message) -> list[str]:
    """Digests of the images of a canonical message, in order."""
    content = message["content"]
    return [] if isinstance(content, str) else [part["image"] for part in content if _is_image(part)]


def _text(message: JsonObject) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise TrajectoryError(f"expected a text, or parts of type text, as content; found {_shown(content)}")


def _tool_call(call: object) -> Message:
    function = call.get("function") or call if isinstance(call, Mapping) else None  # some leave the wrapping out
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TrajectoryError(f"expected a tool call with a function and its name, found {_shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            pass  # what a model wrote need not be JSON
    if arguments is None:  # "null" is what some clients send for a function without parameters
        arguments = {}
    named = {} if call.get("id") is None else {"id": call["id"]}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
