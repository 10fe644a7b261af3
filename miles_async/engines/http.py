"""HTTP of the rollout side: one session for engines, router and generation; reading answers and event streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

import aiohttp
import msgspec

from miles_async.errors import EngineError, RequestRejectedError, TransientEngineError
from miles_async.runtime.network.keys import EngineKeys
from miles_async.runtime.network.tls import Tls

Result = TypeVar("Result")

ERROR_TEXT = 500  # characters of an answer that go into a message
_CONNECT_SECONDS = 30.0
_EVENT_END = b"\n\n"
_EVENT_DATA = b"data:"


class Http:
    """Opens the session at first use, when the event loop that it belongs to is running."""

    def __init__(self, keys: EngineKeys | None = None, tls: Tls | None = None) -> None:
        """``keys``: of engines and routers; None if they need none. ``tls``: None without TLS.

        Raises ConfigurationError if the files of ``tls`` cannot be used.
        """
        self._ssl = True if tls is None else tls.client()
        self.as_client: Mapping[str, str] = keys.api.headers() if keys else {}  # headers of requests for generation
        self.as_admin: Mapping[str, str] = keys.admin.headers() if keys else {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session, for use on one event loop only."""
        if self._session is None:
            # No limit on connections: the dispatcher bounds generation, and calls that pause or abort must
            # never queue behind it. No total timeout: every call brings its own.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            )
        return self._session

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def decode_json(body: bytes, kind: type[Result], source: str) -> Result:
    """Decode ``body`` as ``kind``. Raises EngineError, since an unexpected answer is the failure of its ``source``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineError(f"{source}: unexpected answer ({error}): {body[:ERROR_TEXT]!r}") from error


def http_error(status: int, text: str) -> EngineError:
    """Classify an answer other than 200: the request's own fault, or worth another try."""
    shown = f"HTTP {status}: {text[:ERROR_TEXT]}"
    if status >= 500 or status in (408, 429) or (status == 404 and "model_not_found" in text):
        return TransientEngineError(shown)
    return RequestRejectedError(shown)


async def event_data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each complete event. ``pieces``: chunks of the body, cut anywhere.

    Engines and router end lines with a line feed and write the data of an event in one line.
    """
    buffer, searched = bytearray(), 0
    async for piece in pieces:
        buffer += piece
        while (end := buffer.find(_EVENT_END, searched)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + len(_EVENT_END)]
            searched = 0
            for line in event.split(b"\n"):
                if line.startswith(_EVENT_DATA):
                    yield line[len(_EVENT_DATA) :].strip()
        searched = max(0, len(buffer) - 1)  # the last byte may begin a separator
