"""Text that the chat template writes for the messages after a turn.

A turn takes as long after 500 turns as after 5: the text is rendered without the turns in the middle, which hardly any
template looks at. Whether that is so is checked by rendering the whole conversation at turns 1, 2, 4, 8 ... of a branch
and when the sample is made; where it isn't, all is rendered from then on (``Renderer.abridges``).
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.errors import TrajectoryError, TransientEngineError
from miles_async.trajectory.context import Context, Tools, Turn, conversation_to, depth_of, path_to
from miles_async.trajectory.messages import Message
from miles_async.trajectory.rendering import Renderer, check_unchanged, text_diff
from miles_async.types import JsonObject


def next_text(
    renderer: Renderer, parent: Turn | None, new: Sequence[Message], tools: Tools, options: JsonObject, *, abridge: bool
) -> tuple[str, bool]:
    """Text that the template writes for ``new`` messages after ``parent``, and whether it was rendered abridged.

    ``abridge``: it may be. Raises TrajectoryError if the template refuses the conversation, or writes what is in front
    of the messages differently now.
    """
    abridged = _abridged_text(renderer, parent, new, tools, options) if abridge else None
    if abridged is not None and not renders_whole(depth_of(parent)):
        return abridged, True
    try:
        text = _whole_text(renderer, parent, new, tools, options)
    except TrajectoryError:
        renderer.abridges &= abridged is None
        raise
    renderer.abridges &= abridged in (None, text)
    return text, False


def renders_whole(turns: int) -> bool:
    """Return whether to render the whole conversation after this many turns: rarely enough to take linear time."""
    return turns & (turns - 1) == 0


def check_abridged(renderer: Renderer, context: Context) -> None:
    """Raises TransientEngineError if rendering the whole conversation changes the text of a context."""
    if not context.abridged:
        return
    try:
        text = _whole_text(renderer, context.parent, context.messages, context.tools, context.options)
        found = None if text == context.text else text_diff(text, context.text)
    except TrajectoryError as error:
        found = str(error)
    if found is not None:
        renderer.abridges = False
        raise TransientEngineError(
            "the chat template renders new turns depending on much earlier ones, so that this conversation has to be "
            f"repeated; from now on whole conversations are rendered at each turn:\n{found}"
        )


def _whole_text(
    renderer: Renderer, parent: Turn | None, new: Sequence[Message], tools: Tools, options: JsonObject
) -> str:
    path = path_to(parent)
    positions = [turn.context.position for turn in path]
    *earlier, text = renderer.pieces([*conversation_to(parent), *new], positions, tools, options)
    for turn, now in zip(path, earlier, strict=True):
        check_unchanged(turn.context.text, now, renderer.opening(options))
    return text


def _abridged_text(
    renderer: Renderer, parent: Turn | None, new: Sequence[Message], tools: Tools, options: JsonObject
) -> str | None:
    """The same text, rendered with nothing in front but what the first turn answered, and the last two turns.

    None if these are all turns, or if that changes what the template writes in front of ``new``.
    """
    if parent is None or depth_of(parent) < 3 or not renderer.abridges:
        return None
    first, last = parent.context.first, parent.context
    assert first is not None
    assert last.parent is not None
    opening = (*first.context.messages, last.parent.reply, *last.messages)
    positions = [len(first.context.messages), len(opening)]
    try:
        *earlier, text = renderer.pieces([*opening, parent.reply, *new], positions, tools, options)
        for context, now in zip((first.context, last), earlier, strict=True):
            check_unchanged(context.text, now, renderer.opening(options))
    except TrajectoryError:
        return None
    return text
