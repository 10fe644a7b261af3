"""Servers that are up already and not ours: attached, brought to our weights, and left as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from miles_async.engines.placement import ServerHandle
from miles_async.errors import EngineError, EngineStartError

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
_POLL_SECONDS = 1.0


class ExternalServers:
    """A LaunchServer whose servers run elsewhere; engine i is the i-th address."""

    def __init__(self, addresses: Sequence[str], start_timeout: float) -> None:
        """``addresses``: host:port. ``start_timeout``: seconds one may take to answer, at first or when it was lost."""
        self._addresses = addresses
        self._start_timeout = start_timeout

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle:
        return _ExternalServer(f"http://{self._addresses[engine_index]}", self._start_timeout)


class _ExternalServer:
    def __init__(self, url: str, start_timeout: float) -> None:
        self._url = url
        self._start_timeout = start_timeout

    async def start(self) -> str:
        try:
            async with asyncio.timeout(self._start_timeout), aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as session:
                while not await self._answers(session):  # noqa: ASYNC110  (it tells nobody)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise EngineStartError(
                f"the external engine at {self._url} did not answer for {self._start_timeout:g} s "
                "(--engine-start-timeout): is it an SGLang server, and reachable from here?"
            ) from None
        return self._url

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self._url}/model_info") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def wait_exit(self) -> str:
        """Never: whoever owns it knows. One that is gone stops answering."""
        await asyncio.Event().wait()
        raise AssertionError

    async def on_host(self, function: Callable[..., Any], room: int, *arguments: Any) -> Any:
        raise EngineError("nothing of ours runs on the host of an external engine")

    async def stop(self) -> None:
        """It is not ours to end; one that was fenced in a pause goes on, or requests would wait in it for ever."""
        async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as session:
            with suppress(aiohttp.ClientError, TimeoutError):  # it may be gone
                async with session.post(f"{self._url}/continue_generation", json={}):
                    pass
