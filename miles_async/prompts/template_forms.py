"""Forms of messages in which chat templates differ, found by rendering short conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from miles_async.types import JsonObject

Renders = Callable[[Sequence[JsonObject]], str | None]
"""Renders a conversation; None if the template refuses it."""

PROBE = "a message that no template has"


def writes_developer(renders: Renders) -> bool:
    """Return whether a template renders the role developer; many silently skip roles that they don't know."""
    text = renders([{"role": "developer", "content": PROBE}, {"role": "user", "content": "a"}])
    return text is not None and PROBE in text


def needs_text_arguments(renders: Renders) -> bool:
    """Return whether a template renders arguments of calls only as JSON texts, as DeepSeek-V3's does."""

    def refuses(arguments: object) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": arguments}}
        asked = {"role": "user", "content": "b"}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        answered = {"role": "tool", "content": "c", "tool_call_id": "call00000", "name": "a"}
        return renders([asked, called, answered]) is None

    return refuses({"d": "e"}) and not refuses('{"d": "e"}')
