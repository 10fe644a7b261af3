"""Protocol between the rollout process and a client process: frames over a pair of connected sockets.

A frame is a prefix, a head in msgpack, and a body that is passed on as it is. Frames that are sent in one turn of the
event loop leave together: with many requests in flight, a system call per frame would cost as much as the rest of it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Generic, TypeVar, cast

import msgspec

from miles_async.runtime.network.tls import Tls

_PREFIX = struct.Struct("<QII")  # number of the request, bytes of the head, bytes of the body


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a client process, its argument as JSON. Keys come in its environment."""

    connection: int  # descriptor of its socket
    path: str  # to which it posts
    tls: Tls | None

    def command(self) -> tuple[str, ...]:
        """Arguments of the interpreter."""
        return ("-m", "miles_async.engines.posting.process", msgspec.json.encode(self).decode())


class Send(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send a request, whose JSON is the frame's body; rollout process → client process."""

    url: str  # of the router or an engine
    routing_key: str


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close the request's connection, since its answer is no longer needed; rollout process → client process."""


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An ``http_post.Answer`` without its body, which is the frame's; client process → rollout process."""

    status: int
    content_type: str
    engine_url: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There is no answer; client process → rollout process."""

    message: str


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent every second, of no request; client process → rollout process."""


ToProcess = Send | Withdraw
FromProcess = Answered | Failed | Alive

Head = TypeVar("Head", ToProcess, FromProcess)  # of the frames that an end receives

_encoder = msgspec.msgpack.Encoder()


def frame(number: int, head: ToProcess | FromProcess, body: bytes = b"") -> tuple[bytes, bytes]:
    """Encode a frame; its body is not copied."""
    encoded = _encoder.encode(head)
    return _PREFIX.pack(number, len(encoded), len(body)) + encoded, body


class Frames(asyncio.Protocol, Generic[Head]):
    """One end of the connection."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Head]) -> None:
        self.over = False
        self._decoder: msgspec.msgpack.Decoder[Head] = decoder
        self._received = bytearray()
        self._to_send: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    async def connect(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def cut(self) -> None:
        """Close the connection at once, without the frames that were not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    def received(self, number: int, head: Head, body: bytes) -> None:
        """Called with every frame of the other end."""
        raise NotImplementedError

    def ended(self) -> None:
        """Called once, when the connection is closed, from whichever side."""
        raise NotImplementedError

    def send(self, number: int, head: ToProcess | FromProcess, body: bytes = b"") -> None:
        """Queue a frame. Frames that the other end does not read stay in memory, which the requests in flight bound."""
        if not self._to_send:
            asyncio.get_running_loop().call_soon(self._flush)
        self._to_send += frame(number, head, body)

    def _flush(self) -> None:
        if self._transport is None:
            return  # connection_made() sends them
        frames, self._to_send = self._to_send, []
        if not self.over:
            self._transport.writelines(frames)

    # ------------------------------------------------------------------------------ called by the event loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have the same methods and another base
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._received += data
        start, available = 0, len(self._received)
        with memoryview(self._received) as view:
            while available - start >= _PREFIX.size:
                number, head_bytes, body_bytes = _PREFIX.unpack_from(view, start)
                head = start + _PREFIX.size
                body = head + head_bytes
                end = body + body_bytes
                if end > available:
                    break
                self.received(number, self._decoder.decode(view[head:body]), bytes(view[body:end]))
                start = end
        del self._received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self.over = True
        self.ended()
