"""JSON that other processes may be writing."""

from __future__ import annotations

from typing import Any

import msgspec


def decoded(line: bytes | str) -> object:
    """The value of a JSON text; None for one that is torn, not UTF-8 or no JSON.

    >>> decoded('{"step": 3}')
    {'step': 3}
    """
    try:
        return msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def decoded_object(text: bytes | str) -> dict[str, Any]:
    """Parse a JSON object; {} if the text is not one."""
    found = decoded(text)
    return found if isinstance(found, dict) else {}
