"""Records of a trajectory: a turn of the model, and the context in which it was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_async.trajectory.messages import Message
from miles_async.types import Generation, Int32, JsonObject, Picture

Tools = Sequence[JsonObject]


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Context of the next turn: the request of an agent, as tokens."""

    parent: Turn | None
    first: Turn | None  # of the branch; None where this is the first turn's context
    depth: int  # turns in front
    messages: tuple[Message, ...]  # new after the parent's reply
    position: int  # of the reply in the conversation
    tools: Tools
    options: JsonObject  # for the template
    text: str  # of the messages, as the template writes them
    abridged: bool  # the text was rendered without the middle of the conversation
    kept: int  # tokens kept of the parent's output: all, or all but a stop token
    appended: Int32  # tokens after these
    appended_text: str
    length: int  # tokens in all
    pictures: tuple[Picture, ...] = ()  # of all of them, in order

    @property
    def prompt_length(self) -> int:
        """Tokens before the first turn of the branch."""
        return self.length if self.first is None else self.first.context.length

    @property
    def routed(self) -> int:
        """Tokens whose experts the turns before have: all of theirs but the last one, which no engine has read."""
        parent = self.parent
        return 0 if parent is None else parent.context.length + min(self.kept, len(parent.sampled.output_ids) - 1)

    def input_ids(self) -> Int32:
        """Tokens for the engine to continue, [length]. Built on each call: storing them would take quadratic memory."""
        pieces: list[Int32] = []
        context = self
        while context.parent is not None:
            pieces += [context.appended, context.parent.sampled.output_ids[: context.kept]]
            context = context.parent.context
        return np.concatenate([context.appended, *pieces[::-1]])


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One turn of the model, with its context."""

    context: Context
    sampled: Generation
    reply: Message
    text: str  # the whole turn, without the tokens that bound it


def path_to(turn: Turn | None) -> list[Turn]:
    """Turns from the first to this one."""
    path = []
    while turn is not None:
        path.append(turn)
        turn = turn.context.parent
    return path[::-1]


def conversation_to(turn: Turn | None) -> list[Message]:
    """Messages up to the reply of this turn, inclusive."""
    return [message for turn in path_to(turn) for message in (*turn.context.messages, turn.reply)]


def depth_of(turn: Turn | None) -> int:
    """Turns up to this one."""
    return 0 if turn is None else turn.context.depth + 1
