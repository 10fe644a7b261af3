"""Calls of tools that a server answers: what the model is told, and what is counted; and a server that is not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_async.errors import ConfigurationError
from miles_async.runtime.texts import shortened
from miles_async.types import JsonObject


@dataclass(frozen=True, slots=True)
class Answer:
    """A tool's answer, as a text for the model."""

    text: str
    is_error: bool = False
    ends: bool = False  # the episode ended with it


def no_server(kind: str, url: str, error: Exception, seconds: float) -> ConfigurationError:
    """The error of a run whose ``--environment`` gave no first answer within ``seconds``. ``kind``: of server."""
    reason = f"nothing within {seconds:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    return ConfigurationError(f"expected {kind} at {url} (--environment), found {shortened(reason)}")


def described(name: str, description: str | None, schema: JsonObject) -> JsonObject:
    """A tool as chat completions have it."""
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


async def answered(
    calls: Sequence[JsonObject], answer: Callable[[str, JsonObject], Awaitable[Answer]]
) -> tuple[list[JsonObject], dict[str, float], bool]:
    """Answer calls in their order, one after another, since a server may have state, up to one that ends the episode.

    ``answer``: (tool, arguments) → its answer. Returns (messages, metrics, whether the episode ended).
    """
    messages, errors, ended = list[JsonObject](), 0, False
    for call in calls:
        tool, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, Mapping):
            told = await answer(tool, arguments)
        else:
            told = Answer("error: expected the arguments to be an object", is_error=True)
        messages.append({"role": "tool", "content": told.text, "tool_call_id": call["id"]})
        errors += told.is_error
        if ended := told.ends:
            break
    return messages, {"tool_calls": len(messages), "tool_errors": errors}, ended
