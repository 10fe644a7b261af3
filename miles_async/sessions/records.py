"""What the rollout process and the session server's process tell each other: msgpack, arrays included."""

from __future__ import annotations

from typing import Any

import msgspec


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """Session server → rollout process, once it listens and every second from then on."""

    instance_id: str  # another one after every start
    url: str  # where agents reach it
    sessions: int
    began: dict[str, int] = {}  # sessions whose first turns were kept since the last word, and a version of each


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout process → session server: what a session samples with."""

    routing_key: str
    sampling: dict[str, Any]  # SGLang's parameters
    max_response: int  # tokens
    max_total: int
    max_turn: int | None = None
    may_constrain: bool = True  # answers may be made to fit a grammar: the loss corrects for it, or there is none
