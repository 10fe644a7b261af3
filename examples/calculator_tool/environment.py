"""The environment: answers calls of the calculator, and pays for a right answer (``--environment-path``)."""

from __future__ import annotations

from typing import Any

from examples.calculator_tool.calculator import CALCULATOR, calculate
from miles_async.types import AssistantTurn, Observation, Prompt


class CalculatorEnvironment:
    """One question. The first turn without a call is the answer."""

    def __init__(self, prompt: Prompt) -> None:
        self._label = prompt.label

    def tools(self) -> list[dict[str, Any]]:
        return [CALCULATOR]

    async def step(self, turn: AssistantTurn) -> Observation:
        calls = turn.message.get("tool_calls", [])
        if not calls:
            right = turn.finish_reason == "stop" and turn.text == self._label
            return Observation(done=True, reward=float(right))
        return Observation(
            messages=tuple(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": calculate(call["function"]["arguments"]["expression"]),
                }
                for call in calls
            ),
            reward=0.0,  # if the episode is cut now
            metrics={"tool_calls": len(calls)},
        )

    async def close(self) -> None:
        pass
