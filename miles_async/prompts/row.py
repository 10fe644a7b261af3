"""Reads and checks one row of prompt data; errors name the fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError, TrajectoryError
from miles_async.prompts.image_parts import image_key, separate
from miles_async.prompts.layouts import ANSWERS, hint, holder, may_lack
from miles_async.prompts.pictures import PictureSource, picture_source
from miles_async.trajectory.messages import Message, from_data, text_of
from miles_async.types import JsonObject, Label

Content = str | list[Message]
"""A text, or messages ``[{"role": "user", "content": "rev 12"}]``."""


_EXACT = 2**53  # float64 has all whole numbers below


class PromptRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checked row, not tokenized yet."""

    row_id: str | None  # value of --prompt-id-key, None without that flag
    content: Content
    label: Label | None
    metadata: JsonObject  # with the row's tools as "tools", too
    tools: tuple[JsonObject, ...] = ()  # that the chat template renders, of --tool-key
    images: tuple[PictureSource, ...] = ()  # in the order of the image parts of its messages

    @property
    def text(self) -> str:
        """The prompt as a person reads it: the text, or the contents of its messages."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(map(text_of, self.content))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a conversation: a text is a message of the user."""
        if isinstance(self.content, str):
            return ({"role": "user", "content": self.content},)
        return tuple(self.content)


def read_row(row: JsonObject, arguments: DataArguments, location: str, *, is_json: bool) -> PromptRow:
    """Check one row. ``is_json``: its values have no types but JSON's. Raises DataError that begins with ``location``
    ("train.jsonl:7").
    """
    tools, metadata = _tools(row, arguments, location), _metadata(row, arguments, location)
    if not is_json:  # as a checkpoint keeps it: times become texts, NaN null
        tools, metadata = msgspec.json.decode(
            msgspec.json.encode((tools, metadata), enc_hook=str), type=tuple[tuple[JsonObject, ...], JsonObject]
        )
    content, images = _content(row, arguments, location)
    return PromptRow(
        row_id=_row_id(row, arguments, location),
        content=content,
        label=_label(row, arguments, location),
        metadata={**metadata, "tools": list(tools)} if tools else metadata,
        tools=tools,
        images=images,
    )


def _value(row: JsonObject, key: str, flag: str, location: str, arguments: DataArguments) -> object:
    try:
        inner, name = holder(row, key)
    except KeyError as error:
        if may_lack(flag, key):
            return None
        found = f"keys of this row: {error.args[0]}{hint(arguments)}"
        raise DataError(f"{location}: no key {key!r} ({flag}); {found}") from None
    return inner[name]


def _content(row: JsonObject, arguments: DataArguments, location: str) -> tuple[Content, tuple[PictureSource, ...]]:
    value = _value(row, arguments.input_key, "--input-key", location, arguments)
    named = f"{location}: {arguments.input_key!r} (--input-key)"
    if value == "":
        raise DataError(f"{named} is an empty text")
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{named} must be a text or a list of messages; found {_shown(value)}")
    try:
        value, images = separate(value, _images(row, arguments, location))
    except DataError as error:
        raise DataError(f"{named}: {error}") from None
    sources = tuple(
        picture_source(image, arguments.image_root, f"{location}: image {number}")
        for number, image in enumerate(images, start=1)
    )
    return _messages(value, arguments, named), sources


def _images(row: JsonObject, arguments: DataArguments, location: str) -> Sequence[object] | None:
    """Images of the row's column; None if no column is named. A row without images may have null there."""
    key = image_key(arguments.multimodal_keys)
    if key is None:
        return None
    value = _value(row, key, "--multimodal-keys", location, arguments)
    if value is None:
        return ()
    return value if isinstance(value, list) else [value]


def _messages(value: str | Sequence[object], arguments: DataArguments, named: str) -> Content:
    if isinstance(value, str):
        return value
    messages: list[Message] = []
    for number, message in enumerate(value, start=1):
        try:
            messages.append(from_data(message))
        except TrajectoryError as error:
            raise DataError(f"{named} must be a text or a list of messages; message {number}: {error}") from None
    if not arguments.apply_chat_template:
        raise DataError(f"{named} holds messages, which need the chat template: leave --no-apply-chat-template out")
    return messages


def _label(row: JsonObject, arguments: DataArguments, location: str) -> Label | None:
    if arguments.label_key is None:
        return None
    value = _value(row, arguments.label_key, "--label-key; none: no labels", location, arguments)
    if value is None and arguments.label_key in ANSWERS:
        return None
    answers = value if isinstance(value, list) else [value]
    texts = [text for answer in answers if (text := _answer(answer)) is not None]
    if not answers or len(texts) < len(answers):
        named = f"{location}: {arguments.label_key!r} (--label-key)"
        expected = "a text or a number, or a list of accepted ones"
        raise DataError(f"{named} must be {expected}; found {_shown(value)}. Use --metadata-key for the rest")
    return texts[0] if len(texts) == 1 else tuple(texts)


def _answer(value: object) -> str | None:
    """The label as a text; None if the value cannot be a label."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)  # tables keep whole numbers as floats where a column has gaps
    if isinstance(value, float) and abs(value) < _EXACT:
        value = Decimal(repr(value))  # 0.00001 is not written as 1e-05
    if isinstance(value, Decimal):  # 1.50 in a table; normalize() would round
        whole, _, fraction = f"{value:f}".partition(".")
        return f"{whole}.{digits}" if (digits := fraction.rstrip("0")) else whole
    is_label = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_label or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return str(value)


def _tools(row: JsonObject, arguments: DataArguments, location: str) -> tuple[JsonObject, ...]:
    if arguments.tool_key is None:
        return ()
    value = _value(row, arguments.tool_key, "--tool-key", location, arguments)
    named = f"{location}: {arguments.tool_key!r} (--tool-key)"
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(f"{named} must be a list of objects, or one as JSON: {error}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)):
        raise DataError(f"{named} must be a list of objects; found {_shown(value)}")
    if value and not arguments.apply_chat_template:
        raise DataError(
            f"{named} holds tools, which need the chat template: leave --no-apply-chat-template out, or give "
            "--tool-key none"
        )
    return tuple(value or ())


def _metadata(row: JsonObject, arguments: DataArguments, location: str) -> JsonObject:
    if arguments.metadata_key is None:
        return {}
    value = _value(row, arguments.metadata_key, "--metadata-key", location, arguments)
    if value is not None and not isinstance(value, Mapping):
        named = f"{location}: {arguments.metadata_key!r} (--metadata-key)"
        raise DataError(f"{named} must be an object; found {_shown(value)}")
    return value or {}


def _row_id(row: JsonObject, arguments: DataArguments, location: str) -> str | None:
    if arguments.prompt_id_key is None:
        return None
    value = _value(row, arguments.prompt_id_key, "--prompt-id-key", location, arguments)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        named = f"{location}: {arguments.prompt_id_key!r} (--prompt-id-key)"
        raise DataError(f"{named} must be a text or a whole number; found {_shown(value)}")
    return str(value)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
