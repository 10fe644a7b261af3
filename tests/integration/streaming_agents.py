"""Agents that stream a turn by each of the three protocols, and ask for their engine's death in the middle of one."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai

from miles_async.types import Prompt

PROTOCOLS = ("chat", "responses", "messages")
_next = itertools.cycle(PROTOCOLS)
_lost: set[str] = set()  # protocols that lost an engine
_lost_at = 0.0  # when the last engine was lost; inf while one is being killed
_RETRIES = 6


async def solve(base_url: str, prompt: Prompt) -> tuple[int, float]:
    """One turn, by the first protocol that has lost no engine, or by each in turn when all have. After an error, chat
    completions' client asks again; the others raise it.
    """
    for left in reversed(range(_RETRIES)):
        protocol = next((each for each in PROTOCOLS if each not in _lost), None) or next(_next)
        try:
            said = await _streamed(protocol, base_url, prompt)
            return 1, float(len(said) % 2)
        except (openai.APIError, anthropic.APIError):
            if protocol != "chat" or not left:
                raise
            await asyncio.sleep(1.0)
    raise AssertionError


async def _streamed(protocol: str, base_url: str, prompt: Prompt) -> str:
    global _lost_at
    folder, began = Path(prompt.metadata["folder"]), time.monotonic()
    shown, asked, outcome = "", False, "complete"
    try:
        async for text in TEXTS[protocol](base_url, prompt.text):
            shown += text
            if len(shown) > 30 and protocol not in _lost and began > _lost_at:
                _lost.add(protocol)
                _lost_at = math.inf
                asked = True
                (folder / f"kill-{protocol}").touch()
                while not (folder / f"killed-{protocol}").exists():  # noqa: ASYNC110, a file tells nobody
                    await asyncio.sleep(0.02)
                _lost_at = time.monotonic()
    except (openai.APIError, anthropic.APIError) as error:
        outcome = f"{type(error).__module__.partition('.')[0]}: {error}"
        if asked:
            (folder / f"told-{protocol}").touch()
        raise
    finally:
        record = {"protocol": protocol, "asked": asked, "shown": shown, "outcome": outcome}
        with (folder / "streams.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    if asked:
        (folder / f"killed-{protocol}").unlink()
        _lost.discard(protocol)
        raise RuntimeError("the engine had sent all before it was killed: another stream shall ask")
    return shown


async def _chat(base_url: str, text: str) -> AsyncIterator[str]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=os.environ["OPENAI_API_KEY"], max_retries=0) as client:
        messages = [{"role": "user", "content": text}]
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
            for choice in chunk.choices:
                yield (getattr(choice.delta, "reasoning_content", None) or "") + (choice.delta.content or "")


async def _responses(base_url: str, text: str) -> AsyncIterator[str]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=os.environ["OPENAI_API_KEY"], max_retries=0) as client:
        async for event in await client.responses.create(model="policy", input=text, stream=True):
            if event.type.endswith("text.delta"):
                yield event.delta
            if event.type in ("error", "response.failed"):
                raise openai.APIError(str(event), None, body=None)  # type: ignore[arg-type]


async def _messages(base_url: str, text: str) -> AsyncIterator[str]:
    url, key = base_url.removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        messages = [{"role": "user", "content": text}]
        created = client.messages.create(model="policy", max_tokens=4000, messages=messages, stream=True)
        async for event in await created:
            if event.type == "content_block_delta":
                yield getattr(event.delta, "thinking", "") + getattr(event.delta, "text", "")


TEXTS = {"chat": _chat, "responses": _responses, "messages": _messages}
