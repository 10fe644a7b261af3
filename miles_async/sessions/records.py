"""Messages between the rollout process and the session server: msgpack, arrays included."""

from __future__ import annotations

import msgspec

from miles_async.types import JsonObject


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sign of life, session server → rollout process, every second once it listens."""

    instance_id: str  # another one after every start
    url: str  # where agents reach it
    sessions: int
    began: dict[str, int] = {}  # sessions whose first turns were kept since the last message, with a version of each


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a session, rollout process → session server."""

    routing_key: str
    sampling: JsonObject  # SGLang's parameters
    max_response: int  # tokens
    max_total: int
    max_turn: int | None = None
    may_constrain: bool = True  # answers may be made to fit a grammar: the loss corrects for it, or there is none
