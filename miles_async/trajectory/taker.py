"""The next turn of a trajectory, from messages to reply: what environments and agents have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.errors import NoRoomError
from miles_async.protocols import EngineClient
from miles_async.trajectory.tree import Context, Tools, Trajectory, Turn
from miles_async.trajectory.turn import take_turn

InThread = Callable[..., Awaitable[Any]]
"""``asyncio.to_thread`` or the like: tokenizing takes as long as there are tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long trajectories may become, in tokens."""

    response: int  # after the prompt, all turns and what is between them
    total: int  # prompt included
    turn: int | None = None  # one turn of the model

    def room(self, context: Context) -> int:
        """What the model may say next. Raises NoRoomError if that is nothing."""
        response = context.length - context.prompt_length
        room = min(self.response - response, self.total - context.length)
        if room <= 0:
            raise NoRoomError(
                f"the conversation has {context.length} tokens, {response} of them after its first turn began: no room "
                f"for another turn with {self.total} (--max-tokens-per-gpu) and {self.response} "
                "(--rollout-max-response-len) at most"
            )
        return room if self.turn is None else min(room, self.turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTaker:
    """Takes the turns of one trajectory."""

    trajectory: Trajectory
    client: EngineClient
    sampling: Mapping[str, Any]  # SGLang's parameters
    limits: Limits
    routing_key: str
    in_thread: InThread

    async def take(
        self,
        messages: Sequence[Any],
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """The model's answer to a whole conversation, kept in the trajectory.

        Args:
            messages: as chat completions have them.
            tools: offered to the model.
            options: more for the chat template.
            max_tokens: of this turn, within the limits.
            stop: more strings that end the turn.

        Raises:
            TrajectoryError: messages that have no tokens, and NoRoomError.
            EngineError: what the client raises.
        """
        context, input_ids = await self.in_thread(self._prepare, messages, tools, options)
        room = self.limits.room(context)
        sampling = {**self.sampling, "max_new_tokens": room if max_tokens is None else min(room, max_tokens)}
        if stop:
            sampling["stop"] = [*self.sampling.get("stop", ()), *stop]
        sampled = await take_turn(self.client, input_ids, sampling, routing_key=self.routing_key)
        turn: Turn = await self.in_thread(self.trajectory.add, context, sampled)
        return turn

    def _prepare(self, messages: Sequence[Any], tools: Tools, options: Mapping[str, Any] | None) -> tuple[Context, Any]:
        context = self.trajectory.extend(messages, tools, options)
        return context, context.input_ids()
