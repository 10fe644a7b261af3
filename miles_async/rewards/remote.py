"""``remote_rm``: a reward model behind HTTP."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import msgspec

from miles_async.errors import RewardError
from miles_async.types import Prompt, Sample

_REQUESTS = 64  # at a time
_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.2, 10.0
_ERROR_TEXT = 500  # characters of an answer that go into a message


class _Reward(msgspec.Struct):
    reward: float


class _Transient(Exception):
    """Another try may succeed."""


class RemoteReward:
    """POSTs prompt, response, label and metadata as JSON; the answer is a number, or an object with ``reward``.

    Connections that fail, silence, 429 and 5xx are tried again, with exponential backoff, until ``timeout``.
    """

    def __init__(self, url: str | None, timeout: float) -> None:
        """``timeout``: seconds for all tries together; one of them gets a third, so that a server that hangs does
        not use up the time of those that would answer.
        """
        self._url = url
        self._timeout = timeout
        self._turns = asyncio.Semaphore(_REQUESTS)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        if self._url is None:
            raise RewardError("no server: give --rm-url")
        body = msgspec.json.encode(
            {"prompt": prompt.text, "response": sample.text, "label": prompt.label, "metadata": prompt.metadata}
        )
        async with self._turns:
            return await self._try(self._url, body)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _try(self, url: str, body: bytes) -> float:
        failure, backoff = "no answer", _BACKOFF_SECONDS
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    try:
                        return await self._post(url, body)
                    except _Transient as error:
                        failure = str(error)
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
                    backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)
        except TimeoutError:
            raise RewardError(f"{url}: {failure}, for {self._timeout:g} s (--reward-timeout)") from None

    async def _post(self, url: str, body: bytes) -> float:
        if self._session is None:  # only here is the event loop there that it belongs to
            self._session = aiohttp.ClientSession(headers={"Content-Type": "application/json"})
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout / 3)
            async with self._session.post(url, data=body, timeout=timeout) as response:
                content = await response.read()
        except TimeoutError:
            raise _Transient("no answer") from None
        except aiohttp.ClientError as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        if response.status == 429 or response.status >= 500:
            raise _Transient(f"status {response.status}: {content[:_ERROR_TEXT]!r}")
        if response.status != 200:
            raise RewardError(f"{url}: status {response.status}: {content[:_ERROR_TEXT]!r}")
        try:
            answer = msgspec.json.decode(content, type=float | _Reward)
        except msgspec.MsgspecError as error:
            raise RewardError(f"{url}: expected a number, found {content[:_ERROR_TEXT]!r} ({error})") from error
        return answer.reward if isinstance(answer, _Reward) else answer
