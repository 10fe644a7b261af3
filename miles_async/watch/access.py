"""Access control: data needs the read key; the one address that changes settings needs the write key.

The page itself has no data, so it opens without the key and asks for it. The key comes in the address after ``#``,
which browsers send to no server, and then in a header that no other site can make a browser send. Host and Origin are
checked on top, against DNS rebinding.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from miles_async.runtime.network.keys import Secret

HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of loopback; a port forwarded by SSH may have any number."""

DATA = "/api/"
CHANGE = "/api/set"
"""The only address that is asked by POST."""

PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Doorkeeper:
    """ASGI middleware that refuses what :func:`refusal` names, and adds PAGE_HEADERS to each answer."""

    def __init__(self, app: ASGIApp, *, key: Secret, write_key: Secret | None = None) -> None:
        """``write_key``: opens what ``key`` does, and CHANGE; None: nothing can be changed."""
        self._app = app
        self._key, self._write_key = key, write_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; other kinds of connections, such as WebSockets, are closed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in PAGE_HEADERS.items()]
                kept = [pair for pair in message["headers"] if pair[0].decode().title() not in PAGE_HEADERS]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        refused = refusal(scope["method"], scope["path"], Headers(scope=scope), self._key, self._write_key)
        if refused is None:
            await self._app(scope, receive, send_with_headers)
        else:
            status, reason = refused
            await JSONResponse({"error": reason}, status_code=status)(scope, receive, send_with_headers)


def refusal(
    method: str, path: str, headers: Mapping[str, str], key: Secret, write_key: Secret | None = None
) -> tuple[int, str] | None:
    """(HTTP status, reason) if a request must not be answered. ``headers``: by their lower-case names."""
    changes = method == "POST" and path == CHANGE and write_key is not None
    if method not in ("GET", "HEAD") and not changes:
        return 405, "this server only shows: it answers GET"
    host = headers.get("host", "")
    if _without_port(host) not in HOSTS:
        return 421, f"this server answers as {', '.join(sorted(HOSTS))} only, not as {host!r}"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return 403, "this server answers its own page only"
    if not path.startswith(DATA):
        return None  # links to the page may stand anywhere
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "this server answers its own page only"
    keys = (write_key,) if changes else (key, write_key)
    if not any(each is not None and each.opens_for(headers.get("authorization")) for each in keys):
        kind = "write key" if changes else "key"
        return 401, f"expected the {kind} that `miles-async watch` printed"
    return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and not name.endswith(":") else host
