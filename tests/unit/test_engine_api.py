"""Calls to one engine."""

from __future__ import annotations

import asyncio

from miles_async.engines.engine_api import EngineApi
from miles_async.engines.http import Http

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n%s\r\n{}"


async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that finds a connection idle for too long just as the next request comes."""
    request = await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"}")
    leaves = b"connection: close" in request.lower()
    writer.write(ANSWER % (b"Connection: close\r\n" if leaves else b""))
    if not leaves:
        await reader.read(1)
        writer.transport.abort()
    writer.close()


async def test_a_call_never_meets_a_connection_that_the_server_closes() -> None:  # covers: C3, C8
    server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
    url = "http://127.0.0.1:{}".format(server.sockets[0].getsockname()[1])
    http = Http()
    async with server:
        for _ in range(2):
            await EngineApi(http).pause(url, "retract", 5.0)
    await http.close()
