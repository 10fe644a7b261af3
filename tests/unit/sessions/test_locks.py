"""Doors of the session server: agents' key for what agents do, the run's for everything."""

from __future__ import annotations

import aiohttp
import pytest

from miles_async.runtime.network.keys import Secret
from tests.fakes.keys import KEYS, OTHER_KEYS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import agent_of

FOR_AGENTS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/policy"),
    ("POST", "/heartbeat"),
    ("POST", "/finish"),
    ("POST", "/abort"),
    ("GET", ""),
]
STRANGERS = (None, Secret("wrong"), OTHER_KEYS.sessions.agents, OTHER_KEYS.sessions.run, KEYS.engines.admin)


async def status(http: aiohttp.ClientSession, method: str, url: str, key: Secret | None) -> tuple[int, str | None]:
    async with http.request(method, url, json={}, headers=key.headers() if key else {}) as response:
        code = (await response.json())["error"]["code"] if response.status == 401 else None
        return response.status, code


@pytest.mark.parametrize(("method", "path"), FOR_AGENTS)
async def test_an_agents_door_opens_with_its_key(method: str, path: str) -> None:
    async with agent_of(ScriptedModel(lambda call, input_ids: [2])) as agent, aiohttp.ClientSession() as http:
        for key in STRANGERS:
            assert await status(http, method, agent.opened.url + path, key) == (401, "invalid_api_key")
        assert (await status(http, method, agent.opened.url + path, KEYS.sessions.agents))[0] in (200, 400)


async def test_clients_of_anthropic_have_the_key_in_another_header() -> None:
    async with agent_of(ScriptedModel(lambda call, input_ids: [2])) as agent, aiohttp.ClientSession() as http:
        for key, expected in ((KEYS.sessions.agents, 200), (OTHER_KEYS.sessions.agents, 401), (Secret(""), 401)):
            headers = {"X-Api-Key": key.reveal()}
            async with http.get(f"{agent.opened.url}/v1/models", headers=headers) as response:
                assert response.status == expected


@pytest.mark.parametrize("path", ["/sessions", "/sessions/{id}/collect"])
async def test_agents_neither_open_nor_collect_sessions(path: str) -> None:
    async with agent_of(ScriptedModel(lambda call, input_ids: [2])) as agent, aiohttp.ClientSession() as http:
        url = agent.opened.url.rpartition("/sessions/")[0] + path.format(id=agent.opened.session_id)
        for key in (*STRANGERS, KEYS.sessions.agents):
            assert await status(http, "POST", url, key) == (401, "invalid_api_key")


async def test_nothing_is_told_to_strangers() -> None:
    async with agent_of(ScriptedModel(lambda call, input_ids: [2])) as agent, aiohttp.ClientSession() as http:
        url = agent.opened.url.rpartition("/sessions/")[0]
        for path in ("/health", "/no-such-page", "/sessions/unknown"):
            assert (await status(http, "GET", url + path, None))[0] == 401
        assert (await status(http, "GET", f"{url}/sessions/unknown", KEYS.sessions.agents))[0] == 404
