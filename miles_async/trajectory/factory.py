"""How a run makes trajectories: template and parsers, chosen once."""

from __future__ import annotations

from collections.abc import Callable

from miles_async.hooks import load_object
from miles_async.trajectory.rendering import ChatFormat, Renderer
from miles_async.trajectory.replies import PARSERS, ParseCalls, ReplyParser
from miles_async.trajectory.tree import Trajectory

MakeTrajectory = Callable[[], Trajectory]


def trajectory_factory(chat: ChatFormat, tool_call_parser: str | None, reasoning_parser: str | None) -> MakeTrajectory:
    """``tool_call_parser``: a name of ``PARSERS``, or module:attr. Raises ConfigurationError."""
    parse_calls = named_parser(tool_call_parser)
    parser = ReplyParser(chat=chat, parse_calls=parse_calls, splits_reasoning=reasoning_parser == "think")
    renderer = Renderer(chat)
    return lambda: Trajectory(renderer, parser)


def named_parser(name: str | None) -> ParseCalls | None:
    """``--tool-call-parser``. Raises ConfigurationError for a hook that cannot be used."""
    if name is None or name in PARSERS:
        return PARSERS.get(name or "")
    parser: ParseCalls = load_object(name, ParseCalls, "--tool-call-parser")
    return parser
