"""An agent that asks about the prompt's image and then shows another, through a protocol of its choice."""

from __future__ import annotations

import anthropic
import openai

from miles_async.types import Prompt
from miles_async.types.pictures import data_url
from tests.fakes.pictures import picture
from tests.fakes.protocol_clients import blocks_of

ANSWER = 3  # tokens
SHOWN = picture(56, 84, "blue")


async def show(base_url: str, prompt: Prompt) -> tuple[int, float]:
    asked = [*prompt.messages]
    (question,) = [part for part in asked[0]["content"] if part["type"] == "text"]
    more = [{"type": "image_url", "image_url": {"url": data_url(SHOWN)}}, question]
    if int(prompt.prompt_id.rpartition(":")[2]) % 2:
        async with openai.AsyncOpenAI(base_url=base_url, max_retries=0) as client:
            chat = client.chat.completions
            answer = (await chat.create(model="policy", messages=asked, max_tokens=ANSWER)).choices[0].message
            asked += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": more}]
            await chat.create(model="policy", messages=asked, max_tokens=ANSWER)
            return 2, float(answer.content == prompt.label)
    key = openai.AsyncOpenAI().api_key
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=0) as other:
        asked = [{"role": "user", "content": blocks_of(asked[0]["content"])}]
        said = (await other.messages.create(model="policy", messages=asked, max_tokens=ANSWER)).content
        asked += [{"role": "assistant", "content": said}, {"role": "user", "content": blocks_of(more)}]
        await other.messages.create(model="policy", messages=asked, max_tokens=ANSWER)
        return 2, float("".join(block.text for block in said) == prompt.label)
