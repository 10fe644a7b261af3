"""One generation request over HTTP, and its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import msgspec

from miles_async.engines.http import Http
from miles_async.errors import TransientEngineError

ROUTING_KEY = "X-SMG-Routing-Key"  # the only header that consistent hashing looks at
ROUTED_WORKER = "x-smg-routed-worker-id"  # in the answer: the URL of the engine


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP answer of any status."""

    status: int
    content_type: str
    engine_url: str  # of the engine that answered, which the router names
    body: bytes


Post = Callable[[str, str, bytes], Awaitable[Answer]]
"""(URL of the router or an engine, routing key, JSON body) → the answer. Raises TransientEngineError if there is none.
Has no deadline of its own; cancellation closes the connection.
"""


def posting_over(http: Http, path: str) -> Post:
    """Post to ``path`` over the connections of ``http``, on its event loop."""
    return partial(_post, http, path)


async def _post(http: Http, path: str, url: str, routing_key: str, body: bytes) -> Answer:
    headers = {"Content-Type": "application/json", ROUTING_KEY: routing_key, **http.as_client}
    try:
        async with http.session.post(url + path, data=body, headers=headers) as response:
            return Answer(
                status=response.status,
                content_type=response.headers.get("Content-Type", ""),
                engine_url=response.headers.get(ROUTED_WORKER, url),
                body=await response.read(),
            )
    except aiohttp.ClientError as error:
        raise TransientEngineError(f"connection to {url} failed: {error!r}") from error
