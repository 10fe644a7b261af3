"""The agent: a loop of chat completions and tool calls, as for any other server of that API.

As a coroutine for ``--agent-path``, or as a command for ``--agent-command "python -m examples.blackbox_agent.agent"``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from openai import AsyncOpenAI

from examples.calculator_tool.calculator import CALCULATOR, calculate
from miles_async.types import Prompt

MAX_TURNS = 4


async def solve(base_url: str, prompt: Prompt) -> int:
    """The turns that it took. It gives no reward: the run's (``--rm-type``) looks at its last answer."""
    return await answer(
        _client().with_options(base_url=base_url, api_key=os.environ["OPENAI_API_KEY"]), prompt.messages
    )


async def answer(client: AsyncOpenAI, question: Iterable[Any]) -> int:
    messages: list[Any] = [*question]
    for turn in range(1, MAX_TURNS + 1):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        if not message.tool_calls:
            return turn
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(_expression(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return MAX_TURNS


def _expression(arguments: str) -> str:
    """The calculator's argument; empty if the model wrote something else."""
    try:
        return str(json.loads(arguments)["expression"])
    except (ValueError, LookupError, TypeError):
        return ""


@lru_cache(maxsize=1)
def _client() -> AsyncOpenAI:
    """One for all sessions: making one takes longer than a turn."""
    return AsyncOpenAI(base_url="http://replaced.by.session", api_key="replaced, too")


async def _main() -> None:
    prompt = json.load(sys.stdin)
    async with AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]) as client:
        print(await answer(client, prompt["messages"]))


if __name__ == "__main__":
    asyncio.run(_main())
