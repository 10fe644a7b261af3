"""Turns of the model, as environments get them."""

from __future__ import annotations

from miles_async.types import AssistantTurn, FinishReason


def answer(content: str, index: int = 0, finish_reason: FinishReason = "stop") -> AssistantTurn:
    """A turn without calls."""
    message = {"role": "assistant", "content": content}
    return AssistantTurn(index=index, message=message, text=content, finish_reason=finish_reason)


def thought(content: str) -> AssistantTurn:
    """An answer after some reasoning, which is no part of it."""
    message = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    return AssistantTurn(index=0, message=message, text=f"<think>hm</think>{content}", finish_reason="stop")


def calling(*calls: tuple[str, object], index: int = 0) -> AssistantTurn:
    """A turn that calls tools, (name, arguments) each, with the ids call000, call001 and so on."""
    called = [
        {"id": f"call{number:03d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "", **({"tool_calls": called} if called else {})}
    return AssistantTurn(index=index, message=message, text="said", finish_reason="stop")
