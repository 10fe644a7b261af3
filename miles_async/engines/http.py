"""The one HTTP session of the rollout side: engines, router and generation share its connections."""

from __future__ import annotations

import aiohttp

_CONNECT_SECONDS = 30.0


class Http:
    """Opens the session at first use, since only then is the event loop there that it belongs to."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """To be used on one event loop only."""
        if self._session is None:
            # No limit on connections: the dispatcher bounds generation, and calls that pause or abort must
            # never queue behind it. No total timeout: every call brings its own.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            )
        return self._session

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
