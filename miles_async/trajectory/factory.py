"""Make trajectories with the chat template and parsers of the run."""

from __future__ import annotations

from collections.abc import Callable

from miles_async.arguments.sessions import ReasoningParser, TurnHistory
from miles_async.runtime.hooks import load_object
from miles_async.trajectory.rendering import ChatFormat, Renderer
from miles_async.trajectory.replies import PARSERS, ParseCalls, ReplyParser
from miles_async.trajectory.tree import Trajectory

MakeTrajectory = Callable[[], Trajectory]


def trajectory_factory(
    chat: ChatFormat,
    tool_call_parser: str | None,
    reasoning_parser: ReasoningParser | None,
    *,
    turn_history: TurnHistory = "sampled",
) -> MakeTrajectory:
    """``tool_call_parser``: a name of ``PARSERS``, or module:attr. ``turn_history``: what a turn continues
    (``--turn-history``). Raises ConfigurationError.
    """
    parser = ReplyParser(
        chat=chat,
        parse_calls=named_parser(tool_call_parser),
        splits_reasoning=reasoning_parser == "think",
        call_style=tool_call_parser if tool_call_parser in PARSERS else None,
    )
    renderer = Renderer(chat)
    return lambda: Trajectory(renderer, parser, as_template_writes=turn_history == "template")


def named_parser(name: str | None) -> ParseCalls | None:
    """``--tool-call-parser``. Raises ConfigurationError for a hook that cannot be used."""
    if name is None or name in PARSERS:
        return PARSERS.get(name or "")
    return load_object(name, ParseCalls, "--tool-call-parser")
