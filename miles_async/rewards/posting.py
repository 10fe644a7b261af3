"""Requests to the servers that rewards ask, tried again while that may help."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import aiohttp

from miles_async.errors import RewardError, RewardUnavailableError

ERROR_TEXT = 500  # characters of an answer that go into a message
_REQUESTS = 64  # at a time
_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.2, 10.0
_NOT_OF_THE_SAMPLE = (401, 403, 404)  # the URL, the model or the key is wrong


class _Transient(Exception):
    """Another try may succeed."""


class Poster:
    """POSTs JSON to one URL. Connections that fail, silence, 429 and 5xx are tried again, with exponential backoff."""

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        """``timeout``: seconds for all tries together; one of them gets a third, so that a server that hangs does
        not use up the time of those that would answer.
        """
        self.url = url
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._turns = asyncio.Semaphore(_REQUESTS)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes) -> bytes:
        """The body of an answer with status 200.

        Raises RewardError if the server refuses the request, RewardUnavailableError for what says nothing about it.
        """
        async with self._turns:
            return await self._try(body)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _try(self, body: bytes) -> bytes:
        failure, backoff = "no answer", _BACKOFF_SECONDS
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    try:
                        return await self._post(body)
                    except _Transient as error:
                        failure = str(error)
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
                    backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)
        except TimeoutError:
            raise RewardUnavailableError(f"{self.url}: {failure}, for {self._timeout:g} s (--reward-timeout)") from None

    async def _post(self, body: bytes) -> bytes:
        if self._session is None:  # only here is the event loop there that it belongs to
            self._session = aiohttp.ClientSession(headers=self._headers)
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout / 3)
            async with self._session.post(self.url, data=body, timeout=timeout) as response:
                content = await response.read()
        except TimeoutError:
            raise _Transient("no answer") from None
        except aiohttp.ClientError as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        if response.status == 429 or response.status >= 500:
            raise _Transient(f"status {response.status}: {content[:ERROR_TEXT]!r}")
        if response.status != 200:
            refusal = RewardUnavailableError if response.status in _NOT_OF_THE_SAMPLE else RewardError
            raise refusal(f"{self.url}: status {response.status}: {content[:ERROR_TEXT]!r}")
        return content
