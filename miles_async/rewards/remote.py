"""``remote_rm``: a reward model behind HTTP; and the requests of rewards to their servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import aiohttp
import msgspec

from miles_async.errors import OverdueError, RewardError, ServiceUnavailableError
from miles_async.types import Prompt, Sample

ERROR_TEXT = 500  # characters of an answer that go into a message
_REQUESTS = 64  # at a time
_NOT_OF_THE_SAMPLE = (401, 403, 404, 429)  # the URL, the model or the key is wrong, or the server is busy


class Poster:
    """POST JSON to one URL. Callers retry failures (``services.Circuit``)."""

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        """``timeout``: seconds for one request, once it has its turn."""
        self.url = url
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._turns = asyncio.Semaphore(_REQUESTS)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes) -> bytes:
        """Return the body of an answer with status 200.

        Raises RewardError if the server refuses the request, ServiceUnavailableError if it fails to answer: connections
        that fail, silence, 429, 5xx, a wrong URL or key.
        """
        async with self._turns:
            return await self._post(body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: bytes) -> bytes:
        if self._session is None:  # only here does the event loop exist that it belongs to
            # aiohttp makes its own context at import, without the authority that this run's servers may have.
            connector = aiohttp.TCPConnector(ssl=ssl.create_default_context())
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout)
            async with self._session.post(self.url, data=body, timeout=timeout) as response:
                content = await response.read()
        except TimeoutError:
            raise OverdueError(f"{self.url}: no answer for {self._timeout:g} s (--reward-timeout)") from None
        except aiohttp.ClientError as error:
            raise ServiceUnavailableError(f"{self.url}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            its_own = response.status < 500 and response.status not in _NOT_OF_THE_SAMPLE
            refusal = RewardError if its_own else ServiceUnavailableError
            raise refusal(f"{self.url}: status {response.status}: {content[:ERROR_TEXT]!r}")
        return content


class _Reward(msgspec.Struct):
    reward: float


class RemoteReward:
    """POSTs prompt, response, label and metadata as JSON; the answer is a number, or an object with ``reward``."""

    def __init__(self, url: str | None, timeout: float) -> None:
        """``timeout``: seconds for one answer."""
        self._server = Poster(url, timeout) if url is not None else None

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        if self._server is None:
            raise RewardError("no server: give --rm-url")
        content = await self._server.post(
            msgspec.json.encode(
                {"prompt": prompt.text, "response": sample.text, "label": prompt.label, "metadata": prompt.metadata}
            )
        )
        try:
            answer = msgspec.json.decode(content, type=float | _Reward)
        except (msgspec.MsgspecError, RecursionError) as error:
            what = f"expected a number, found {content[:ERROR_TEXT]!r} ({error})"
            raise RewardError(f"{self._server.url}: {what}") from error
        return answer.reward if isinstance(answer, _Reward) else answer

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
