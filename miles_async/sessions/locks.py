"""Locks of the session server: the run's key opens everything, that of agents what agents do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from miles_async.runtime.network.keys import SessionKeys
from miles_async.sessions.problems import gone

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OF_THE_RUN = ("/sessions", "/sessions/{id}/collect")  # routes: opening a session, and taking its sample


def locked(keys: SessionKeys) -> Middleware:
    """Middleware that answers 401 to requests without the key for their path."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        for_run = resource is not None and resource.canonical in _OF_THE_RUN
        opening = (keys.run,) if for_run else (keys.run, keys.agents)
        if not any(key.opens_for(request.headers.get("Authorization")) for key in opening):
            expected = "the run's own key" if for_run else "the key that agents find in OPENAI_API_KEY"
            what = f"expected the header 'Authorization: Bearer KEY' with {expected}, found none or another"
            raise gone(web.HTTPUnauthorized, what, "invalid_api_key")
        return await handler(request)

    return middleware
