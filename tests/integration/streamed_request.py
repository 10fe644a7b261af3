"""A request whose tokens a test sees come, so that what it does next meets a request under way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from uuid import uuid4

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
        self._http, self._url = http, url
        self._id = body.get("rid", uuid4().hex)
        self._so_far: JsonObject = {}
        self._ended = False
        self._more = asyncio.Condition()
        self.reply = asyncio.ensure_future(self._read(events(http, url, {**body, "rid": self._id})))

    async def goes_on(self) -> None:
        """Wait for another token, or the end."""
        before = self._tokens()
        await self._until(lambda: self._tokens() > before)

    async def stop_under(self, version: int) -> JsonObject:
        """Wait for a token of the version, then end the request. Returns its answer."""
        await self._until(lambda: self._so_far["meta_info"]["weight_version"] == str(version))
        await self.goes_on()
        async with self._http.session.post(f"{self._url}/abort_request", json={"rid": self._id}) as response:
            assert response.status == 200
        return await self.reply

    def _tokens(self) -> int:
        return len(self._so_far.get("output_ids", ()))

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(_SECONDS), self._more:
            await self._more.wait_for(lambda: self._ended or reached())

    async def _read(self, stream: AsyncIterator[bytes]) -> JsonObject:
        async for data in stream:
            async with self._more:
                if data == b"[DONE]":
                    self._ended = True
                else:
                    self._so_far = json.loads(data)  # of all tokens so far
                self._more.notify_all()
        return self._so_far
