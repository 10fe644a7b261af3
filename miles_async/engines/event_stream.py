"""Reads server-sent events from the body of a response."""

from __future__ import annotations

from collections.abc import AsyncIterator

_END = b"\n\n"
_DATA = b"data:"


async def event_data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each complete event. ``pieces``: chunks of the body, cut anywhere.

    Engines and router end lines with a line feed and write the data of an event in one line.
    """
    buffer, searched = bytearray(), 0
    async for piece in pieces:
        buffer += piece
        while (end := buffer.find(_END, searched)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + len(_END)]
            searched = 0
            for line in event.split(b"\n"):
                if line.startswith(_DATA):
                    yield line[len(_DATA) :].strip()
        searched = max(0, len(buffer) - 1)  # the last byte may be the first of an end
