"""Agents of a session server in this process, with clients of OpenAI and Anthropic and a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai

from miles_async.runtime.serialization import decode, encode
from miles_async.sessions.server import SessionServer
from miles_async.sessions.session import SessionSettings
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import THINK_TAGS, ReplyParser
from miles_async.trajectory.taker import Limits, MakeTrajectory
from miles_async.trajectory.tree import Trajectory
from miles_async.types import CollectedSession, JsonObject, OpenSession, Sample
from tests.fakes.chat_formats import chat_format
from tests.fakes.keys import KEYS
from tests.fakes.reply_parsers import BEGINS, parse_qwen, split_think
from tests.fakes.scripted_model import ScriptedModel

CHAT = chat_format("qwen3")
END = CHAT.tokenize("<|im_end|>")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "17*4"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "17*4?"}


PARSER = ReplyParser(
    chat=CHAT,
    parse_calls=parse_qwen,
    split_reasoning=split_think,
    reasoning_tags=THINK_TAGS,
    call_style="qwen",
    call_end="</tool_call>",
    call_begins=BEGINS["qwen"],
)


def says(*texts: str) -> Callable[[int, list[int]], list[int]]:
    return lambda call, input_ids: [*CHAT.tokenize(texts[min(call, len(texts) - 1)]), *END]


def make_trajectory() -> Trajectory:
    return Trajectory(Renderer(CHAT), PARSER)


@dataclass
class Agent:
    """One session and clients in it."""

    opened: OpenSession
    client: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: aiohttp.ClientSession

    async def chat(self, *messages: JsonObject, **options: object) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages, **options)

    async def respond(self, *items: JsonObject, **options: object) -> Any:
        return await self.client.responses.create(model="policy", input=[*items], **options)

    async def message(self, *messages: JsonObject, **options: object) -> Any:
        options = {"max_tokens": 400, **options}
        return await self.anthropic.messages.create(model="policy", messages=messages, **options)

    async def post(self, path: str, body: object = None, *, raw: object = None) -> tuple[int, dict[str, object]]:
        """``raw``: the body as bytes, or pieces of it as they come."""
        sent = {"json": body} if raw is None else {"data": raw}
        async with self.http.post(f"{self.opened.url}/{path}", **sent) as response:
            return response.status, await response.json()

    async def status(self) -> JsonObject:
        async with self.http.get(self.opened.url) as response:
            return await response.json()

    async def is_idle(self) -> None:
        """Return once no request of the session is under way."""
        async with asyncio.timeout(20):
            while (await self.status())["idle_seconds"] == 0:  # noqa: ASYNC110, the server tells nobody
                await asyncio.sleep(0.01)

    async def collect(self) -> CollectedSession:
        async with self.http.post(f"{self.opened.url}/collect") as response:
            assert response.status == 200, await response.text()
            return decode(await response.read(), CollectedSession)

    async def sample(self) -> Sample:
        """Collect the session; return its sample, which there is."""
        sample = (await self.collect()).sample
        assert sample is not None
        return sample

    async def turns_and_branches(self) -> tuple[int, int]:
        """Collect the session; return how many its sample has."""
        sample = await self.sample()
        return sample.metadata["turns"], len(sample.branches)


@asynccontextmanager
async def agent_of(
    model: ScriptedModel,
    *,
    timeout: float = 60.0,
    make: MakeTrajectory = make_trajectory,
    max_response: int = 500,
    max_total: int = 900,
    **settings: object,
) -> AsyncIterator[Agent]:
    server = SessionServer(model, make, keys=KEYS.sessions, session_timeout=timeout)
    await server.start("127.0.0.1")
    expiry = asyncio.ensure_future(server.expire())
    async with aiohttp.ClientSession(headers=KEYS.sessions.run.headers()) as http:
        limits = Limits(response=max_response, total=max_total)
        body = SessionSettings(**{"routing_key": "7-1", "sampling": {"temperature": 1.0}, "limits": limits, **settings})
        async with http.post(f"{server.url}/sessions", data=encode(body)) as response:
            opened = decode(await response.read(), OpenSession)
        options: dict[str, Any] = {"api_key": KEYS.sessions.agents.reveal(), "max_retries": 0}
        # Without certificates, whose loading takes longer than a test.
        plain, other_plain = (each.DefaultAsyncHttpxClient(verify=False) for each in (openai, anthropic))
        async with openai.AsyncOpenAI(base_url=opened.base_url, http_client=plain, **options) as client:
            async with anthropic.AsyncAnthropic(base_url=opened.url, http_client=other_plain, **options) as other:
                yield Agent(opened, client, other, http)
    expiry.cancel()
    await server.stop()
