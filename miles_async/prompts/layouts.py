"""Columns of rows by name, with fields inside of them by a dotted path (``reward_model.ground_truth``), and layouts of
other projects, recognized by their columns where no flag names columns.

Each layout becomes columns that ``--input-key``, ``--label-key`` and ``--metadata-key`` could name, so that errors and
checks are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from miles_async.arguments.data import INPUT_KEY, LABEL_KEY, DataArguments
from miles_async.errors import DataError
from miles_async.types import JsonObject

if TYPE_CHECKING:
    import pyarrow

USUAL_KEYS = {"--metadata-key": "metadata", "--tool-key": "tools"}
"""Flag → the column's usual name. Rows may lack a column of that name; any other that a flag names has to be there."""

_ROLES = {
    "human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""``from`` of ShareGPT's turns → role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Columns of another project."""

    name: str
    columns: tuple[str, ...]  # by which it is recognized
    more: tuple[str, ...] = ()  # that are read as well if they are there
    rendered: tuple[str, ...] = ()  # columns with messages besides input_key's
    input_key: str
    label_key: str
    metadata_key: str | None = None
    convert: Callable[[JsonObject, str], JsonObject] | None = None  # (row, its location) → row; raises DataError

    def keys(self, arguments: DataArguments) -> DataArguments:
        """``arguments`` with the keys of this layout; flags for tools, metadata and ids stay."""
        metadata = arguments.metadata_key or self.metadata_key
        return replace(arguments, input_key=self.input_key, label_key=self.label_key, metadata_key=metadata)

    def describe(self) -> str:
        """Description for a note."""
        metadata = f" --metadata-key {self.metadata_key}" if self.metadata_key else ""
        return f"{self.name}: --input-key {self.input_key} --label-key {self.label_key}{metadata}"


def recognize(columns: Collection[str], arguments: DataArguments) -> Layout | None:
    """The layout of a file with these columns; None if flags name columns, or the usual ones are there."""
    if not _uses_defaults(arguments) or {INPUT_KEY, LABEL_KEY} <= {*columns}:
        return None
    return next((layout for layout in LAYOUTS if {*layout.columns} <= {*columns}), None)


def hint(arguments: DataArguments) -> str:
    """End of an error about a missing column: the columns that are recognized without flags."""
    if not _uses_defaults(arguments):
        return ""
    known = "; ".join(f"{layout.name}: {' and '.join(layout.columns)}" for layout in LAYOUTS)
    return f". Columns that are recognized without flags: {INPUT_KEY} and {LABEL_KEY}; {known}"


def _uses_defaults(arguments: DataArguments) -> bool:
    return (arguments.input_key, arguments.label_key) == (INPUT_KEY, LABEL_KEY)


def _verl(row: JsonObject, location: str) -> JsonObject:
    """With what verl's reward functions get in the metadata."""
    found = {name: row[name] for name in ("data_source", "ability") if row.get(name) is not None}
    extra = row.get("extra_info") or {}
    return {**row, "extra_info": {**found, **extra} if isinstance(extra, Mapping) else extra}


def _trl(row: JsonObject, location: str) -> JsonObject:
    """With a completion that is a list of messages taken apart as a conversation is."""
    completion = row.get("completion")
    if not isinstance(completion, list):
        return {**row, "completion[-1]": completion}
    prompt = row.get("prompt")
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages, answer = _split([*(asked or []), *completion])
    return {**row, "prompt": messages, "completion[-1]": answer}


def _messages(row: JsonObject, location: str) -> JsonObject:
    messages, answer = _split(row.get("messages"))
    return {**row, "messages": messages, "messages[-1]": answer}


def _sharegpt(row: JsonObject, location: str) -> JsonObject:
    turns = row.get("conversations")
    if not isinstance(turns, list):
        return {**row, "conversations[-1]": None}
    begin = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = [_turn(turn, f"{location}: conversations[{number}]") for number, turn in enumerate(turns)]
    conversation, answer = _split([*begin, *messages])
    return {**row, "conversations": conversation, "conversations[-1]": answer}


def _turn(turn: Any, where: str) -> Any:
    """``{"from": "human", "value": "hello"}`` as a message. Raises DataError beginning with ``where``."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn  # a message already, or nothing that can be read: the row's check says so
    author, value = turn["from"], turn.get("value")
    if author == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _calls(value, where)}
    if author not in _ROLES:
        raise DataError(f"{where}.from must be one of {', '.join([*_ROLES, 'function_call'])}; found {author!r}")
    return {"role": _ROLES[author], "content": value}


def _calls(value: Any, where: str) -> Sequence[JsonObject]:
    try:
        calls = msgspec.json.decode(value, type=JsonObject | list[JsonObject])
        listed = calls if isinstance(calls, list) else [calls]
        named = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in listed]
    except (msgspec.MsgspecError, TypeError, KeyError) as error:
        raise DataError(
            f'{where}.value of a function_call must be JSON such as {{"name": "search", "arguments": {{}}}}: {error!r}'
        ) from None
    return [{"type": "function", "function": call} for call in named]


def _split(messages: Any) -> tuple[Any, str | None]:
    """(messages, answer): a last turn of the assistant that is plain text is the answer; else there is none."""
    if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], Mapping):
        return messages, None
    last = {name: value for name, value in messages[-1].items() if value is not None}
    if last.keys() != {"role", "content"} or last["role"] != "assistant" or not isinstance(last["content"], str):
        return messages, None
    return messages[:-1], last["content"]


LAYOUTS = (
    Layout(
        name="verl",
        columns=("prompt", "reward_model"),
        more=("data_source", "ability", "extra_info"),
        input_key="prompt",
        label_key="reward_model.ground_truth",
        metadata_key="extra_info",
        convert=_verl,
    ),
    Layout(
        name="TRL",
        columns=("prompt", "completion"),
        rendered=("completion",),
        input_key="prompt",
        label_key="completion[-1]",
        convert=_trl,
    ),
    Layout(
        name="messages",
        columns=("messages",),
        input_key="messages",
        label_key="messages[-1]",
        convert=_messages,
    ),
    Layout(
        name="ShareGPT",
        columns=("conversations",),
        more=("system",),
        input_key="conversations",
        label_key="conversations[-1]",
        convert=_sharegpt,
    ),
)

ANSWERS = ("completion[-1]", "messages[-1]", "conversations[-1]")
"""Keys of answers that a row may lack: its conversation ends otherwise, such as with a call of a tool."""


def may_lack(flag: str, key: str) -> bool:
    """Return whether rows may lack this column."""
    return USUAL_KEYS.get(flag) == key


def holder(row: Any, key: str) -> tuple[dict[str, Any], str]:
    """Object that holds ``key``, and its name there. Raises KeyError with what there is instead.

    >>> holder({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth")
    ({'ground_truth': '4'}, 'ground_truth')
    """
    if key in row:
        return row, key
    name, dot, rest = key.partition(".")
    inner = row.get(name) if dot else None
    if not isinstance(inner, Mapping):
        raise KeyError(", ".join(sorted(row)) or "none")
    try:
        return holder(inner, rest)
    except KeyError as error:
        raise KeyError(", ".join(f"{name}.{there}" for there in error.args[0].split(", "))) from None


def lacking(rows: Iterable[JsonObject], key: str) -> int:
    """Number of rows without ``key``."""
    number = 0
    for row in rows:
        try:
            holder(row, key)
        except KeyError:
            number += 1
    return number


def column_of(schema: pyarrow.Schema, key: str) -> tuple[str, pyarrow.DataType]:
    """Column of ``key``, or of the object that it leads into, and the type of its values. Raises KeyError with what
    there is instead.
    """
    from pyarrow import types

    rest, fields, inside = key, {field.name: field.type for field in schema}, ""
    while rest not in fields:
        name, dot, rest = rest.partition(".")
        if not dot or name not in fields or not types.is_struct(fields[name]):
            raise KeyError(", ".join(inside + field for field in fields) or "none")
        fields, inside = {field.name: field.type for field in fields[name]}, f"{inside}{name}."
    column = key.partition(".")[0] if inside else key
    return column, fields[rest]
