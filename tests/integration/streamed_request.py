"""A request whose tokens a test sees come, so that what it does next meets a request under way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

from miles_async.engines.http import Http, event_data
from miles_async.types import JsonObject

_SECONDS = 60.0  # until a token comes


async def events(http: Http, url: str, body: Mapping[str, object]) -> AsyncIterator[bytes]:
    """What SGLang streams as the answer to ``body``."""
    async with http.session.post(f"{url}/generate", json={**body, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        async for data in event_data(response.content.iter_any()):
            yield data


class StreamedRequest:
    """``reply`` is its whole answer."""

    def __init__(self, http: Http, url: str, body: Mapping[str, object]) -> None:
        self._tokens = 0
        self._more = asyncio.Condition()
        self.reply = asyncio.ensure_future(self._read(events(http, url, body)))

    async def goes_on(self) -> None:
        """Wait for another token."""
        before = self._tokens
        async with asyncio.timeout(_SECONDS), self._more:
            await self._more.wait_for(lambda: self._tokens > before)

    async def _read(self, stream: AsyncIterator[bytes]) -> JsonObject:
        reply: JsonObject = {}
        async for data in stream:
            if data != b"[DONE]":
                reply = json.loads(data)  # of all tokens so far
                async with self._more:
                    self._tokens = len(reply["output_ids"])
                    self._more.notify_all()
        return reply
