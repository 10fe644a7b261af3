"""In the server's process: its HTTP doors open with the run's keys only.

SGLang (0.5.23) has ``--api-key`` and ``--admin-api-key``. But everybody on a machine sees the arguments of a process,
its log has them at level info, and ``/server_info`` shows the admin key to holders of the other. So its middleware is
given the keys here, and its arguments have none. It leaves open whatever begins like ``/health``, ``/ready`` or
``/metrics``, such as ``/health_generate``, which makes the GPU work: here only the paths of ``OPEN`` stay open. It does
not look at websockets (``/v1/realtime``, for speech), which are refused here. Servers that it starts next to this one,
or in its place, are refused: by their flags (``known_flags.py``) and by their variables, here.

After its start SGLang requests its own ``/freeze_gc`` with the key of its arguments, which would be refused and leave
a traceback in the log. ``server.is_up`` requests it with the admin key instead.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from miles_async.errors import ConfigurationError
from miles_async.runtime.network.keys import EngineKeys

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/ready")
"""Paths that need no key: they cost nothing and say whether the server is up. The router asks for the first."""

OTHER_SERVERS = {"SGLANG_GRPC_PORT", "SGLANG_RUST_SERVER"}
"""Variables by which SGLang serves otherwise than by its HTTP server."""

_REFUSED = {"type": "websocket.close", "code": 1008}  # before it was accepted: HTTP status 403


class NoWebsockets:
    """ASGI middleware that refuses websockets."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send(dict(_REFUSED))
        else:
            await self._application(scope, receive, send)


def lock(keys: EngineKeys) -> None:
    """Lock the HTTP server that this process is about to start. Raises ConfigurationError for servers without locks."""
    if found := OTHER_SERVERS & os.environ.keys():
        raise ConfigurationError(f"{' '.join(sorted(found))}: SGLang serves without the run's keys then; unset it")
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import auth

    auth.decide_request_auth = partial(_decide, auth.decide_request_auth)
    auth.add_api_key_middleware(http_server.app, api_key=keys.api.reveal(), admin_api_key=keys.admin.reveal())
    http_server.app.add_middleware(NoWebsockets)
    http_server._freeze_gc_after_server_warmup = lambda server_args: None


def _decide(decide: Callable[..., Any], *, path: str, **request: Any) -> Any:
    """SGLang's decision, with every path outside ``OPEN`` disguised as one that needs a key."""
    return decide(path=path if path in OPEN else f"/locked{path}", **request)
