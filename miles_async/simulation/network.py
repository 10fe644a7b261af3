"""HTTP without sockets: what ``Http.session`` is to the real client, fleet and engine API.

A URL is ``sim://HOST/PATH``. A host that is gone refuses connections; an exchange with one that dies is cut.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, cast

import aiohttp

from miles_async.engines.http import Http


class Response:
    """The part of aiohttp's response that the project uses."""

    def __init__(self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.headers = headers or {}
        self._body = body

    async def read(self) -> bytes:
        return self._body


class Host(Protocol):
    """Something that listens. May raise aiohttp.ClientError: the connection is cut."""

    async def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response: ...


class Network:
    """Hosts by URL; has the methods of aiohttp.ClientSession that the project uses."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}

    def post(self, url: str, *, data: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[Response]:
        return self.request("POST", url, data=data, headers=headers)

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, data: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[Response]:
        host, path = self.host(url)
        yield await host.answer(path, data or b"", headers)

    def host(self, url: str) -> tuple[Host, str]:
        """Return the host that listens at ``url`` and the path. Raises ClientConnectionError if there is none."""
        slash = url.index("/", len("sim://"))
        host = self.hosts.get(url[:slash])
        if host is None:
            raise aiohttp.ClientConnectionError(f"nothing listens at {url[:slash]}")
        return host, url[slash:]


class SimulatedHttp(Http):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    @property
    def session(self) -> aiohttp.ClientSession:
        return cast(aiohttp.ClientSession, self._network)
