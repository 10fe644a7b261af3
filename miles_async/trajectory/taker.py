"""Take the next turn of a trajectory, from messages to reply, for environments and agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from miles_async.api import EngineClient
from miles_async.arguments.sessions import TurnHistory
from miles_async.errors import NoRoomError
from miles_async.trajectory.constraints import GRAMMAR, Constraint, grammar
from miles_async.trajectory.context import Context, Tools, Turn
from miles_async.trajectory.rendering import ImageFormat, Renderer
from miles_async.trajectory.replies import ReplyParser
from miles_async.trajectory.streamed import StreamedTurn
from miles_async.trajectory.tree import Trajectory
from miles_async.trajectory.turn import take_turn
from miles_async.types import GenerateRequest, Int32, JsonObject

InThread = Callable[..., Awaitable[Any]]
"""``asyncio.to_thread`` or the like, since tokenizing takes time in proportion to the tokens."""

_FEW_TOKENS = 1024  # of an answer: decoded faster than handed to a thread and back


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the length of trajectories, in tokens."""

    response: int  # after the prompt: all turns and the text between them
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

    def cut(self, turn: Turn) -> bool:
        """Whether they ended the turn, rather than the model or the request."""
        return turn.sampled.finish_reason == "length" and len(turn.sampled.output_ids) >= self.room(turn.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A request for a turn, whatever protocol it came in."""

    messages: Sequence[object]  # the conversation, in the form of chat completions; must not be changed afterwards
    tools: Tools  # offered to the model
    options: JsonObject = field(default_factory=dict)  # for the chat template
    max_tokens: int | None = None  # of this turn, within the limits
    stops: Sequence[str] = ()  # more texts that end the turn; the reply leaves them out, the tokens have them
    parallel_calls: bool = True  # the reply may have several calls of tools
    constraint: Constraint | None = None  # restricts sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTaker:
    """Takes the turns of one trajectory."""

    trajectory: Trajectory
    client: EngineClient
    sampling: JsonObject  # SGLang's parameters
    limits: Limits
    routing_key: str
    in_thread: InThread
    began: Callable[[int], None]  # called with the version of a token that carries loss

    async def take(self, request: TurnRequest, streamed: StreamedTurn | None = None) -> Turn:
        """Sample the model's answer to a conversation and keep it in the trajectory. ``streamed``: gets its tokens
        while they are sampled.

        Raises:
            TrajectoryError: messages that have no tokens, a constraint that cannot be kept, and NoRoomError.
            EngineError: what the client raises.
        """
        context, input_ids = (
            self._prepare(request)
            if self.trajectory.adds_little(request.messages, request.tools)
            else await self.in_thread(self._prepare, request)
        )
        room = self.limits.room(context)
        sampling = {**self.sampling, "max_new_tokens": min(room, request.max_tokens or room)}
        parser, images, stops = self.trajectory.parser, self.trajectory.renderer.images, [*request.stops]
        if images is not None:
            sampling["stop_token_ids"] = sorted(images.placeholders)
        if request.tools and not request.parallel_calls and parser.call_end is not None:
            stops.append(parser.call_end)
        if stops:
            sampling["stop"] = [*self.sampling.get("stop", ()), *stops]
        if request.constraint is not None:
            style, tags = parser.call_style, parser.reasoning_tags
            sampling[GRAMMAR] = grammar(request.constraint, context.text, call_style=style, reasoning_tags=tags)
        stopped, parallel = (*self.sampling.get("stop", ()), *request.stops), request.parallel_calls
        if streamed is not None:
            streamed.begin(parser, context, stops=stopped, parallel_calls=parallel)
        call = GenerateRequest(
            input_ids=input_ids,
            sampling=sampling,
            routing_key=self.routing_key,
            pictures=context.pictures,
            image_token=None if images is None else images.image_token,
            experts_from=context.routed,
            decoder_id=parser.chat.decoder_id,
        )
        sampled = await take_turn(self.client, call, on_tokens=streamed, decode=parser.chat.decode)
        shown = None if streamed is None else streamed.end()
        add = partial(self.trajectory.add, context, sampled, stops=stopped, parallel_calls=parallel, shown=shown)
        turn: Turn = add() if len(sampled.output_ids) <= _FEW_TOKENS else await self.in_thread(add)
        # Neither a stop token, in whose place the template may write another, nor what a grammar dictates carries loss.
        if len(sampled.output_ids) > 1 and not sampled.constrained:
            self.began(int(sampled.weight_versions[0]))
        return turn

    def _prepare(self, request: TurnRequest) -> tuple[Context, Int32]:
        context = self.trajectory.extend(request.messages, request.tools, request.options)
        return context, self.trajectory.input_ids(context)


MakeTrajectory = Callable[[], Trajectory]


def trajectory_factory(parser: ReplyParser, *, turn_history: TurnHistory, images: ImageFormat | None) -> MakeTrajectory:
    """Make trajectories with the chat template and parsers of the run.

    ``turn_history``: what a turn continues (``--turn-history``). ``images``: None for a model that reads none.
    """
    renderer = Renderer(parser.chat, images)
    return lambda: Trajectory(renderer, parser, as_template_writes=turn_history == "template")
