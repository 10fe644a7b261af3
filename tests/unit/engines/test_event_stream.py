"""Server-sent events, however the network cuts them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from miles_async.engines.http import event_data

STREAM = b'data: {"a":1}\n\n: a comment\n\nevent: x\ndata:2\n\ndata: [DONE]\n\ndata: cut'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_come_whole_wherever_the_network_cuts_them(size: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(STREAM), size):
            yield STREAM[at : at + size]

    assert [data async for data in event_data(pieces())] == [b'{"a":1}', b"2", b"[DONE]"]


async def test_an_event_is_there_as_soon_as_it_has_come() -> None:
    came: list[bytes] = []

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\nda"
        assert came == [b"1"]
        yield b"ta: 2\n\n"

    async for data in event_data(pieces()):
        came.append(data)
    assert came == [b"1", b"2"]
