"""Servers that the run did not start: attached, brought to the run's weights, and left running at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

from miles_async.engines.http import Http
from miles_async.engines.kind import Arguments, ServerHandle
from miles_async.errors import EngineError, EngineStartError
from miles_async.runtime.network.addresses import LOCAL, Network
from miles_async.runtime.network.keys import EngineKeys
from miles_async.runtime.tasks import afterwards
from miles_async.seams import InferenceServer

_PROBE_SECONDS = 5.0
_POLL_SECONDS = 1.0


class ExternalServers:
    """A ``LaunchServer`` whose servers run elsewhere; engine i is the i-th address."""

    def __init__(
        self,
        addresses: Sequence[str],
        start_timeout: float,
        calls: Callable[[Http], InferenceServer],
        keys: EngineKeys | None = None,
        network: Network = LOCAL,
    ) -> None:
        """``addresses``: host:port. ``start_timeout``: seconds one may take to answer, at first or after it was lost.
        ``calls``: makes their client. ``keys``: their keys. ``network``: whether they use TLS.
        """
        self._addresses = addresses
        self.start_timeout = start_timeout
        self._calls = calls
        self._keys = keys
        self._network = network

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle:
        host, _, port = self._addresses[engine_index].rpartition(":")
        return _ExternalServer(self, self._network.url(host, int(port)))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[InferenceServer]:
        http = Http(self._keys, self._network.tls)
        async with afterwards(http.close):
            yield self._calls(http)


class _ExternalServer:
    def __init__(self, servers: ExternalServers, url: str) -> None:
        self._servers = servers
        self._url = url

    async def start(self) -> str:
        error: EngineError | None = None
        start_timeout = self._servers.start_timeout
        try:
            async with asyncio.timeout(start_timeout), self._servers.client() as server:
                while True:
                    try:
                        await server.weight_version(self._url, _PROBE_SECONDS)
                        return self._url
                    except EngineError as silence:
                        error = silence
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise EngineStartError(
                f"the external engine at {self._url} did not answer for {start_timeout:g} s "
                f"(--engine-start-timeout): does it run, is it reachable from here, and the kind of server that this "
                f"run talks to? Last: {error}"
            ) from None

    async def wait_exit(self) -> NoReturn:
        """Wait forever: only its owner knows. A server that is gone stops answering."""
        await asyncio.Event().wait()
        raise AssertionError

    async def on_host(
        self, function: Callable[[Path, *Arguments], object], room: int, *arguments: *Arguments
    ) -> NoReturn:
        raise EngineError("nothing of ours runs on the host of an external engine")

    async def stop(self) -> None:
        """Leave it running, and resume it if it was fenced in a pause, or its requests would wait forever."""
        async with self._servers.client() as server:
            with suppress(EngineError):  # it may be gone
                await server.resume(self._url, _PROBE_SECONDS)
