"""Tokens passed on while they are sampled, from an inference server to a client's stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from miles_async.api import EngineClient
from miles_async.types import GenerateRequest, Generation


class OnTokens(Protocol):
    """Called with the tokens of a call, or of a turn, while they are sampled."""

    def __call__(self, at: int, token_ids: Sequence[int]) -> None:
        """Replace the tokens from position ``at`` on with ``token_ids``; (0, ()) retracts all of them.

        Raises TransientEngineError, which ends the call, if retracted tokens were shown already.
        """
        ...


@runtime_checkable
class StreamingClient(EngineClient, Protocol):
    """An ``EngineClient`` that passes tokens on while they are sampled."""

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> Generation:
        """Like :meth:`generate`; calls ``on_tokens`` meanwhile, perhaps not with all tokens. The result counts.

        Raises what ``generate`` and ``on_tokens`` raise.
        """
        ...


class StreamEvent(NamedTuple):
    """One event of a server's stream."""

    token_ids: Sequence[int] = ()  # new ones
    answer: tuple[bytes, str] | None = None  # body and content type for ``InferenceServer.decode``: the last event


@runtime_checkable
class StreamingServer(Protocol):
    """An ``InferenceServer`` that can stream, as server-sent events."""

    def encode_stream(self, request: GenerateRequest, *, request_id: str, version: int, experts: bool) -> bytes:
        """Like ``InferenceServer.encode``, for an answer that is streamed."""
        ...

    def read_event(self, data: bytes, before: int, url: str) -> StreamEvent:
        """Read the data of one event. ``before``: number of tokens in earlier events.

        Raises TransientEngineError, naming ``url``, for an unusable event, and the error that an event reports.
        """
        ...
