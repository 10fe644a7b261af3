"""Calls to one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from miles_async.engines.http import Http
from miles_async.engines.sglang.api import UNKNOWN_TOKENS_IN_FLIGHT, SGLangServer
from miles_async.errors import EngineError, EngineTimeoutError
from tests.fakes.fake_engine import FakeEngine

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


async def test_a_call_never_meets_a_connection_that_the_server_closes(http: Http) -> None:  # covers: A3, C8
    server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
    url = "http://127.0.0.1:{}".format(server.sockets[0].getsockname()[1])
    async with server:
        for _ in range(2):
            await SGLangServer(http).pause(url, "retract", 5.0)


async def test_an_engine_that_others_started_is_told_to_keep_its_draft_model(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    async def call(server: SGLangServer, url: str, path: str, timeout: float, body: Mapping[str, object]) -> None:
        sent.append(body["selector"])

    monkeypatch.setattr(SGLangServer, "_call", call)
    await SGLangServer(http).begin_update("http://engine", 5.0)
    await SGLangServer(http).receive_bucket("http://engine", "group", [], 3, 5.0)
    assert sent == ["target", "target"]


@pytest.mark.parametrize(("error", "left"), [(EngineError("no"), ["a", "b"]), (EngineTimeoutError("late"), [])])
async def test_an_engine_that_refuses_weights_leaves_the_groups_in_which_others_wait_for_it(
    error: EngineError, left: list[str], http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C8
    leaving = []

    async def call(server: SGLangServer, url: str, path: str, timeout: float, body: Mapping[str, object]) -> None:
        if path == "/update_weights_from_distributed":
            raise error
        leaving.append((path, body["group_name"]))
        raise EngineError("there is no such group")  # as of one whose scheduler failed

    monkeypatch.setattr(SGLangServer, "_call", call)
    with pytest.raises(type(error), match=str(error)):
        await SGLangServer(http).receive_stream("http://engine", ["a", "b"], 3, 5.0)
    assert leaving == [("/destroy_weights_update_group", name) for name in left]


@pytest.mark.parametrize(
    ("server_info", "expected"),
    [
        ({"speculative_algorithm": None, "speculative_num_draft_tokens": None}, 1),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}, 4),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": None}, UNKNOWN_TOKENS_IN_FLIGHT),
        (
            {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4, "speculative_adaptive": True},
            UNKNOWN_TOKENS_IN_FLIGHT,
        ),
        ({}, UNKNOWN_TOKENS_IN_FLIGHT),
    ],
)
async def test_an_engine_says_how_many_tokens_a_pass_may_yield(
    server_info: dict[str, object], expected: int, http: Http
) -> None:
    # covers: C1, M1
    async with FakeEngine(server_info=server_info) as engine:
        assert await SGLangServer(http).probe(engine.url, 5.0) == expected
