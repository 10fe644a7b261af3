"""A client process: ``python -m miles_async.engines.posting.process <settings as JSON>``.

Sends the requests that the rollout process hands to it, and hands back the answers. It knows nothing of weights,
versions and engines, and ends with the connection to the rollout process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress

import msgspec
import uvloop

from miles_async.engines.http import Http
from miles_async.engines.posting.http_post import Post, posting_over
from miles_async.engines.posting.wire import Alive, Answered, Failed, Frames, Send, Settings, ToProcess
from miles_async.errors import TransientEngineError
from miles_async.runtime import garbage
from miles_async.runtime.network.keys import take_engine_keys
from miles_async.runtime.tasks import afterwards

ALIVE_SECONDS = 1.0  # between signs of life


class Requests(Frames[ToProcess]):
    """The requests under way, each a task of ``scope``."""

    def __init__(self, post: Post, scope: asyncio.TaskGroup) -> None:
        super().__init__(msgspec.msgpack.Decoder(ToProcess))
        self.end = asyncio.Event()
        self._post = post
        self._scope = scope
        self._running: dict[int, asyncio.Task[None]] = {}

    def received(self, number: int, head: ToProcess, body: bytes) -> None:
        if isinstance(head, Send):
            self._running[number] = self._scope.create_task(self._answer(number, head, body))
        elif (task := self._running.pop(number, None)) is not None:  # else the answer is on its way
            task.cancel()

    def ended(self) -> None:
        for task in self._running.values():
            task.cancel()
        self.end.set()

    async def _answer(self, number: int, request: Send, body: bytes) -> None:
        try:
            answer = await self._post(request.url, request.routing_key, body)
        except TransientEngineError as error:
            self.send(number, Failed(str(error)))
        except Exception as error:  # supervision point: a request that nobody foresaw fails alone
            self.send(number, Failed(f"{request.url}: {error!r}"))
        else:
            self.send(number, Answered(answer.status, answer.content_type, answer.engine_url), answer.body)
        finally:
            self._running.pop(number, None)


async def serve(connection: socket.socket, http: Http, path: str) -> None:
    """Serve until the rollout process closes the connection."""
    garbage.settle()
    async with afterwards(http.close), asyncio.TaskGroup() as scope:
        requests = Requests(posting_over(http, path), scope)
        await requests.connect(connection)
        while not requests.end.is_set():
            requests.send(0, Alive())
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_SECONDS):
                    await requests.end.wait()


def main(arguments: list[str]) -> None:
    (settings,) = arguments
    given = msgspec.json.decode(settings, type=Settings)
    http = Http(take_engine_keys(os.environ), given.tls)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(socket.socket(fileno=given.connection), http, given.path))


if __name__ == "__main__":
    main(sys.argv[1:])
