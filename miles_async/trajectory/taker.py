"""Take the next turn of a trajectory, from messages to reply, for environments and agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles_async.api import EngineClient
from miles_async.errors import NoRoomError
from miles_async.trajectory.constraints import GRAMMAR, Constraint, grammar
from miles_async.trajectory.replies import CALL_ENDS
from miles_async.trajectory.tree import Context, Tools, Trajectory, Turn
from miles_async.trajectory.turn import take_turn
from miles_async.types import Int32, JsonObject

InThread = Callable[..., Awaitable[Any]]
"""``asyncio.to_thread`` or the like, since tokenizing takes time in proportion to the tokens."""


_FEW_TOKENS = 1024  # of an answer: decoded faster than handed to a thread and back


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the length of trajectories, in tokens."""

    response: int  # after the prompt, all turns and what is between them
    total: int  # prompt included
    turn: int | None = None  # one turn of the model

    def room(self, context: Context) -> int:
        """Tokens left for the next turn. Raises NoRoomError if there are none."""
        response = context.length - context.prompt_length
        room = min(self.response - response, self.total - context.length)
        if room <= 0:
            raise NoRoomError(
                f"the conversation has {context.length} tokens, {response} of them after its first turn began: no room "
                f"for another turn with {self.total} (--max-tokens-per-gpu, the model's positions) and {self.response} "
                "(--rollout-max-response-len) at most"
            )
        return room if self.turn is None else min(room, self.turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTaker:
    """Takes the turns of one trajectory."""

    trajectory: Trajectory
    client: EngineClient
    sampling: JsonObject  # SGLang's parameters
    limits: Limits
    routing_key: str
    in_thread: InThread
    began: Callable[[int], None] = lambda version: None  # told the version of a token of each turn, which carries loss

    @property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Decoder that keeps special tokens."""
        return self.trajectory.renderer.chat.decode_all

    async def take(
        self,
        messages: Sequence[object],
        tools: Tools = (),
        options: JsonObject | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        parallel_calls: bool = True,
        constraint: Constraint | None = None,
    ) -> Turn:
        """Sample the model's answer to a conversation and keep it in the trajectory.

        Args:
            messages: in the form of chat completions. Must not be changed afterwards.
            tools: offered to the model.
            options: more for the chat template.
            max_tokens: of this turn, within the limits.
            stop: more strings that end the turn; the reply leaves them out, the tokens have them.
            parallel_calls: the reply may have several calls of tools.
            constraint: restricts the turn.

        Raises:
            TrajectoryError: messages that have no tokens, a constraint that cannot be kept, and NoRoomError.
            EngineError: what the client raises.
        """
        context, input_ids = (
            self._prepare(messages, tools, options)
            if self.trajectory.adds_little(messages, tools)
            else await self.in_thread(self._prepare, messages, tools, options)
        )
        room = self.limits.room(context)
        sampling = {**self.sampling, "max_new_tokens": room if max_tokens is None else min(room, max_tokens)}
        parser = self.trajectory.parser
        call_end = CALL_ENDS.get(parser.call_style or "") if tools and not parallel_calls else None
        if stops := [*stop, *([call_end] if call_end else [])]:
            sampling["stop"] = [*self.sampling.get("stop", ()), *stops]
        if constraint is not None:
            style, splits = parser.call_style, parser.splits_reasoning
            sampling[GRAMMAR] = grammar(constraint, context.text, call_style=style, splits_reasoning=splits)
        key = self.routing_key
        sampled = await take_turn(self.client, input_ids, sampling, routing_key=key, routed=context.routed)
        add = partial(self.trajectory.add, context, sampled, stops=stop, parallel_calls=parallel_calls)
        turn: Turn = add() if len(sampled.output_ids) <= _FEW_TOKENS else await self.in_thread(add)
        # Neither a stop token, in whose place the template may write another, nor what a grammar dictates carries loss.
        if len(sampled.output_ids) > 1 and not sampled.constrained:
            self.began(int(sampled.weight_versions[0]))
        return turn

    def _prepare(self, messages: Sequence[Any], tools: Tools, options: JsonObject | None) -> tuple[Context, Int32]:
        context = self.trajectory.extend(messages, tools, options)
        return context, self.trajectory.input_ids(context)
