"""An environment for models that know tool calls: it answers those of the calculator (``--environment-path``)."""

from __future__ import annotations

from typing import Any

from examples.calculator_tool.calculator import CALCULATOR, calculate
from miles_async.types import AssistantTurn, Observation, Prompt


class WithCalculator:
    """One question. The first turn without a call is the answer; the run's reward (``--rm-type``) looks at it."""

    def __init__(self, prompt: Prompt) -> None: ...

    def tools(self) -> list[dict[str, Any]]:
        return [CALCULATOR]

    async def step(self, turn: AssistantTurn) -> Observation:
        calls = turn.message.get("tool_calls", [])
        return Observation(
            messages=tuple(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": calculate(str(call["function"]["arguments"].get("expression", ""))),
                }
                for call in calls
            ),
            done=not calls,
            metrics={"tool_calls": len(calls)},
        )

    async def close(self) -> None: ...
