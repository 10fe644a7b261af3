"""Which key each call to engines and router carries, and how smg and SGLang are given theirs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_async.engines.http import Http
from miles_async.engines.kind import ServerSpec
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.engines.router_launcher import with_keys
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.locks import OPEN, NoWebsockets, _decide
from miles_async.engines.sglang.server import server_command
from miles_async.errors import ConfigurationError, EngineError
from miles_async.runtime.network.addresses import Network
from miles_async.types import JsonObject
from tests.fakes.keys import KEYS
from tests.sglang_source import SRT

# covers: C13

API, ADMIN = KEYS.engines.api, KEYS.engines.admin


@dataclass
class Listener:
    """Notes the key of each request, and answers nothing useful."""

    url: str = ""
    keys: dict[str, str | None] = field(default_factory=dict)  # by path

    async def answer(self, request: web.Request) -> web.Response:
        self.keys[request.path] = request.headers.get("Authorization")
        return web.Response(status=500)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", listener.answer)
    async with TestServer(application) as server:
        listener.url = str(server.make_url("")).rstrip("/")
        yield listener


async def test_what_changes_an_engine_carries_the_admin_key_and_all_else_the_other(listener: Listener) -> None:
    http = Http(KEYS.engines)
    server, url = SGLangServer(http), listener.url
    calls = [
        server.pause(url, "abort", 5),
        server.flush_cache(url, 5),
        server.abort(url, "r", 5),
        server.load_files(url, "d", 1, 5),
        server.weight_version(url, 5),
        server.probe(url, 5),
        server.load(url, 5),
        server.make_progress(url, 5),
        server.score(url, [1, 2], 5),
    ]
    for call in calls:
        with pytest.raises(EngineError):
            await call
    await http.close()
    admin = {path for path, key in listener.keys.items() if key == f"Bearer {ADMIN.reveal()}"}
    assert admin == {"/pause_generation", "/flush_cache", "/abort_request", "/update_weights_from_disk"}
    others = {key for path, key in listener.keys.items() if path not in admin}
    assert others == {f"Bearer {API.reveal()}"}


def test_the_router_gets_its_keys_inside_of_its_process() -> None:
    arguments = with_keys(["--port=1"], KEYS.engines)
    assert arguments[:2] == ["launch", "--port=1"]
    assert f"--api-key={API.reveal()}" in arguments
    assert f"--control-plane-api-keys=run:run:admin:{ADMIN.reveal()}" in arguments
    assert with_keys(["--port=1"], None) == ["launch", "--port=1"]


def test_commands_hold_no_key() -> None:
    spec = ServerSpec(model_path="m", device="cuda", dtype="float32", keys=KEYS.engines)
    command = " ".join(server_command(spec, "node-1", 1, ("node-1", 2), 0, 0))
    assert not [key for key in (API, ADMIN) if key.reveal() in command]


def test_no_router_without_keys_where_others_reach_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1"):
        Router(EngineRegistry(), Http(), log_dir=tmp_path, network=Network(host="10.0.0.1"), port=8400)


@pytest.fixture
def sglangs() -> Any:
    """SGLang's own module of decisions, which imports nothing; its package takes 10 s."""
    spec = importlib.util.spec_from_file_location("sglangs_auth", SRT / "utils" / "auth.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sglangs_auth", module)  # dataclasses look there
        spec.loader.exec_module(module)
        yield module


def test_only_two_paths_of_an_engine_need_no_key(sglangs: Any) -> None:
    request = {
        "method": "GET",
        "api_key": API.reveal(),
        "admin_api_key": ADMIN.reveal(),
        "auth_level": sglangs.AuthLevel.NORMAL,
    }

    def allowed(path: str, key: str | None) -> bool:
        header = None if key is None else f"Bearer {key}"
        return _decide(sglangs.decide_request_auth, path=path, authorization_header=header, **request).allowed

    locked = ("/health_generate", "/healthy", "/health/", "/metrics", "/metrics/", "/ready/now", "/model_info")
    assert [path for path in (*OPEN, *locked) if allowed(path, None)] == ["/health", "/ready"]
    assert [path for path in locked if allowed(path, "wrong")] == []
    assert [path for path in locked if not allowed(path, API.reveal())] == []
    assert sglangs.decide_request_auth(path="/health_generate", authorization_header=None, **request).allowed, (
        "SGLang locks it now: locks.py need not"
    )


async def test_websockets_of_an_engine_are_refused() -> None:
    seen: list[JsonObject] = []

    async def application(scope: JsonObject, receive: object, send: object) -> None:
        seen.append(scope["type"])

    async def send(message: JsonObject) -> None:
        seen.append(message["type"])

    async def receive() -> None: ...

    door = NoWebsockets(application)
    await door({"type": "websocket"}, receive, send)
    await door({"type": "http"}, receive, send)
    assert seen == ["websocket.close", "http"]
