"""Environments that answer calls of the calculator (``--environment-path``)."""

from __future__ import annotations

from typing import Any

import msgspec

from examples.calculator_tool.calculator import CALCULATOR, calculate
from examples.tool_model.calls import argument, result
from miles_async.types import AssistantTurn, Observation, Prompt


class WithCalculator:
    """One question. The first turn without a call is the answer; the run's reward (``--rm-type``) looks at it."""

    def __init__(self, prompt: Prompt) -> None:
        self._label = prompt.label

    def tools(self) -> list[dict[str, Any]]:
        return [CALCULATOR]

    async def step(self, turn: AssistantTurn) -> Observation:
        calls = turn.message.get("tool_calls", [])
        return Observation(
            messages=tuple(result(call, calculate(argument(call, "expression"))) for call in calls),
            done=not calls,
            metrics={"tool_calls": len(calls)},
        )

    async def close(self) -> None: ...


class CalculatorEnvironment(WithCalculator):
    """The same, and it pays for a right answer itself: an environment's reward comes before the run's."""

    async def step(self, turn: AssistantTurn) -> Observation:
        observation = await super().step(turn)
        right = observation.done and turn.finish_reason == "stop" and turn.text == self._label
        return msgspec.structs.replace(observation, reward=float(right))  # 0 as well if the episode is cut after a call
