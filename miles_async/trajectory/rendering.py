"""Render the text that a chat template writes between the turns of the model.

The whole conversation is rendered with a mark in place of each turn that the model sampled, and cut at the marks. So
a piece is what the template makes of the messages *in their place*, with everything before and after them, and text
of the model is never rendered. Rendering again at the next turn also shows whether the template still
writes what it wrote before; if not, the tokens are no longer what the template would make, which is an error (M14).
Changes that a template makes inside of a turn, such as dropping earlier reasoning, don't matter: sampled tokens stay.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

from miles_async.errors import TrajectoryError
from miles_async.trajectory.messages import Message
from miles_async.types import JsonObject, Picture

_MARK = secrets.token_hex(8)  # in no conversation

_LONGEST_OPTION = 256  # characters of an option's text
_LARGEST_OPTION = 1_000_000  # of numbers, with which a template might repeat something; budgets of thinking are tokens


class Decoder(Protocol):
    """Tokens to text."""

    @property
    def decoder_id(self) -> int | None:
        """See ``GenerateRequest``."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode a response without the tokens that bound it, such as the one that ends a turn."""
        ...

    def trim(self, text: str) -> str:
        """Leave the tokens that bound a response out of its text."""
        ...


class ChatFormat(Decoder, Protocol):
    """A tokenizer and its chat template (``prompts.templates.ChatTemplate``)."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        ...

    @property
    def stop_texts(self) -> Sequence[str]:
        """Texts that end a turn in this run, whichever tokens they are sampled as."""
        ...

    @property
    def variables(self) -> frozenset[str]:
        """Variables of the template that a request may set."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        options: JsonObject,
        *,
        generation_prompt: bool,
    ) -> str:
        """Render a conversation. Raises TrajectoryError when the template refuses it."""
        ...

    def tokenize(self, text: str) -> Sequence[int]:
        """Tokenize rendered text; nothing is added to it."""
        ...

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Decode with all tokens."""
        ...


class ImageFormat(Protocol):
    """How a model reads images (``runtime.picture_processor.PictureProcessor``)."""

    @property
    def image_token(self) -> int:
        """The token that stands for a part of an image."""
        ...

    @property
    def placeholders(self) -> frozenset[int]:
        """All tokens in whose place the model reads something else."""
        ...

    def read(self, url: str, known: Mapping[str, Picture]) -> Picture:
        """Read the image of a ``data:`` URL, unless its digest is ``known``. Raises TrajectoryError."""
        ...

    def expand(self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Sequence[int]:
        """Repeat the token that the template wrote for each image as often as the image has parts.

        Raises TrajectoryError unless it wrote one for each.
        """
        ...


class Renderer:
    """Renders conversations in pieces."""

    def __init__(self, chat: ChatFormat, images: ImageFormat | None = None) -> None:
        """``images``: None for a model that reads none."""
        self.chat = chat
        self.images = images
        self.abridges = True  # new text may be rendered without turns long before
        self.stop_tokens = {chat.decode_all([token]): token for token in chat.stop_ids}  # by their text
        self._keeps_calls = not self._writes_results(calls=False)  # results of tools need the calls that they answer
        self._drops_results = self._keeps_calls and self._writes_results(calls=True) is False
        self._openings: dict[str, str] = {}  # by options

    def _writes_results(self, *, calls: bool) -> bool | None:
        """Whether the template writes a tool's result, after a turn with the call or without; None if it refuses."""
        turn: Message = {"role": "assistant", "content": "a"}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]} if calls else turn
        result = {"role": "tool", "tool_call_id": call["id"], "content": _MARK}
        try:
            text = self.chat.render(
                [{"role": "user", "content": "b"}, asked, result, turn], (), {}, generation_prompt=False
            )
        except TrajectoryError:
            return None
        return _MARK in text

    def tokenize(self, text: str, pictures: Sequence[Picture]) -> Sequence[int]:
        """Tokenize rendered text with these images. Raises TrajectoryError as ``ImageFormat.expand`` does."""
        tokens = self.chat.tokenize(text)
        if self.images is None:
            return tokens
        return self.images.expand(tokens, [(picture.width, picture.height) for picture in pictures])

    def opening(self, options: JsonObject) -> str:
        """Return what the template writes to open the next turn; empty if that depends on the conversation."""
        key = repr(sorted(options.items()))
        if key not in self._openings:
            self._openings[key] = self._written_opening(options)
        return self._openings[key]

    def _written_opening(self, options: JsonObject) -> str:
        question = {"role": "user", "content": "a"}
        try:
            closed = self.chat.render([question], (), options, generation_prompt=False)
            opened = self.chat.render([question], (), options, generation_prompt=True)
        except TrajectoryError:
            return ""
        return opened.removeprefix(closed) if opened.startswith(closed) else ""

    def pieces(
        self,
        messages: Sequence[Message],
        sampled: Sequence[int],
        tools: Sequence[JsonObject],
        options: JsonObject,
    ) -> list[str]:
        """Return the text in front of each turn in ``messages``, and in front of the next turn.

        Args:
            messages: the conversation so far.
            sampled: ascending positions in it of the turns of the model.
            tools: as the template takes them.
            options: more for the template, such as ``enable_thinking``.

        Raises:
            TrajectoryError: the template refuses the conversation, or hides a turn or a tool's result.
        """
        if self._drops_results and any(message["role"] == "tool" for message in messages):
            raise TrajectoryError("the chat template leaves out messages of the role 'tool': the model has no tools")
        marks = {position: f"{_MARK}{number:06d}" for number, position in enumerate(sampled)}
        masked = [self._masked(message, marks[i]) if i in marks else message for i, message in enumerate(messages)]
        pieces, rest = [], self.chat.render(masked, tools, options, generation_prompt=True)
        for position, mark in marks.items():
            before, found, rest = rest.partition(mark)
            if not found:
                raise TrajectoryError(
                    f"the chat template leaves out turn {position} of the assistant: {messages[position]}"
                )
            pieces.append(before)
        return [*pieces, rest]

    def _masked(self, message: Message, mark: str) -> Message:
        calls = message.get("tool_calls")
        if not (calls and self._keeps_calls):
            return {"role": "assistant", "content": mark}
        empty = [{**call, "function": {"name": call["function"]["name"], "arguments": {}}} for call in calls]
        empty[0]["function"]["arguments"] = {"mark": mark}
        return {"role": "assistant", "content": "", "tool_calls": empty}

    def after_turn(self, text: str) -> tuple[str, str, str]:
        r"""Split a piece that follows a turn into (text that closes the turn, the stop at its end, the rest).

        The first two are empty if the template writes no stop after a turn.

        >>> renderer.after_turn("<|im_end|>\n<|im_start|>user\n ...")
        ('<|im_end|>', '<|im_end|>', '\n<|im_start|>user\n ...')
        """
        found = [(at, stop) for stop in (*self.stop_tokens, *self.chat.stop_texts) if (at := text.find(stop)) >= 0]
        if not found:
            return "", "", text
        at, stop = min(found)
        begin = 0
        if text[:at].strip():
            if not self._keeps_calls:  # a later message holds it
                return "", "", text
            begin = at  # the end of a masked call
        end = at + len(stop)
        return text[begin:end], stop, text[end:]


def check_unchanged(before: str, now: str, opening: str = "") -> None:
    """Check that pieces that are in the tokens already are rendered the same ``now``. Raises TrajectoryError.

    ``opening``: of a turn (``Renderer.opening``), with which ``before`` may end. Past turns may be opened otherwise:
    some templates open reasoning for the next turn, and close it in past turns without any.
    """
    if now.startswith(before.removesuffix(opening)) or before.startswith(now):
        return
    raise TrajectoryError(
        "the chat template renders earlier messages differently now, so that appended tokens would differ from what "
        f"it makes of the whole conversation:\n{text_diff(before, now)}"
    )


def text_diff(expected: str, found: str) -> str:
    """Return where two texts begin to differ, in linear time: an agent's may have megabytes."""
    pairs = enumerate(zip(expected, found, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(expected), len(found)))
    around = slice(max(0, at - 80), at + 160)
    return f"expected ...{expected[around]!r}\nfound    ...{found[around]!r}"


def check_options(options: JsonObject | None, variables: frozenset[str]) -> None:
    """Check the ``chat_template_kwargs`` of a request. Raises TrajectoryError naming the one that is not allowed.

    ``variables``: of the template, that requests may set. Everything else could replace the template, or what the
    run fills in.
    """
    for name, value in (options or {}).items():
        if name not in variables:
            known = ", ".join(sorted(variables)) or "none"
            raise TrajectoryError(
                f"chat_template_kwargs: {name[:100]} is not an option of the chat template, which has {known}"
            )
        if isinstance(value, str) and len(value) <= _LONGEST_OPTION:
            continue
        if value is None or (isinstance(value, (bool, int, float)) and abs(value) <= _LARGEST_OPTION):
            continue
        raise TrajectoryError(
            f"chat_template_kwargs: {name}: expected a boolean, a number of at most {_LARGEST_OPTION:,}, or a text of "
            f"at most {_LONGEST_OPTION} characters"
        )
