"""JSON of any depth is an error that names its file, line or flag, wherever it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_async.arguments.config_file import read_config_file
from miles_async.arguments.data import DataArguments
from miles_async.arguments.model_files import read_json, read_shapes
from miles_async.arguments.server_groups import read_server_groups
from miles_async.arguments.sessions import parse_environment_config
from miles_async.backends.megatron.families.hf_config import read_config
from miles_async.engines.http import decode_json
from miles_async.errors import ConfigurationError, DataError, EngineError, TrajectoryError
from miles_async.prompts.rows import open_prompts
from miles_async.runtime.nesting import DEEPEST, too_deep, too_large
from miles_async.sessions.protocols.chat_completions import read_request
from tests.fakes.reply_parsers import parse_qwen

DEEP = "[" * 50_000 + "]" * 50_000


def _rows(line: str, **keys: str) -> Callable[[Path], object]:
    def read(directory: Path) -> object:
        path = directory / "train.jsonl"
        path.write_text('{"prompt": "a", "t": "[]"}\n' + line + "\n")
        return open_prompts(DataArguments(prompt_data=(str(path),), label_key=None, metadata_key=None, **keys))

    return read


def _file(name: str, text: str, read: Callable[[Path], object], *, directory: bool = False) -> Callable[[Path], object]:
    def read_file(folder: Path) -> object:
        (folder / name).write_text(text)
        return read(folder if directory else folder / name)

    return read_file


@pytest.mark.parametrize(
    ("read", "error", "named"),
    [
        (_file("run.toml", f"a = {DEEP}", read_config_file), ConfigurationError, r"--config: cannot read .*run\.toml"),
        (_file("fleet.toml", f"a = {DEEP}", read_server_groups), ConfigurationError, r"--server-groups .*fleet\.toml"),
        (_file("config.json", DEEP, read_config, directory=True), ConfigurationError, r"config\.json: not JSON"),
        (_rows(f'{{"prompt": "b", "metadata": {DEEP}}}'), DataError, r"train\.jsonl:2: expected JSON of at most 100"),
        (
            _rows(f'{{"prompt": "b", "x": {"[" * 101 + "]" * 101}}}'),
            DataError,
            r"train\.jsonl:2: expected JSON of",
        ),
        (
            _rows(f'{{"prompt": "b", "t": "{DEEP}"}}', tool_key="t"),
            DataError,
            r"train\.jsonl:2: 't' \(--tool-key\) must be",
        ),
        (
            lambda _: parse_environment_config(DEEP),
            ConfigurationError,
            r"--environment-config .*expected a JSON object",
        ),
        (lambda _: read_request(DEEP.encode()), TrajectoryError, "not a request for a chat completion"),
        (lambda _: decode_json(DEEP.encode(), Any, "engine-0"), EngineError, "engine-0: unexpected answer"),
    ],
    ids=["config", "groups", "model", "row", "shallow row", "tools", "settings", "agent", "engine"],
)
def test_it_is_named(read: Callable[[Path], object], error: type[Exception], named: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=named):
        read(tmp_path)


def test_what_a_model_writes_is_a_text(tmp_path: Path) -> None:
    parse_qwen(f"<tool_call>{DEEP}</tool_call>", ())
    (tmp_path / "index.json").write_text(DEEP)
    assert read_json(tmp_path / "index.json") == {}
    (tmp_path / "a.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    with pytest.raises(ValueError, match="header of a safetensors file"):
        read_shapes(tmp_path / "a.safetensors")


def test_depth_is_counted_in_lists_and_objects() -> None:
    nested: object = 1
    for _ in range(DEEPEST):
        nested = {"a": [nested, nested]} if isinstance(nested, list) else [nested]
    assert not too_deep(nested, levels=200)
    circle: dict[str, object] = {}
    circle.update(a=circle, b=[circle, circle])
    assert too_deep(circle)
    assert not too_deep(json.loads("[" * DEEPEST + "]" * DEEPEST))
    assert too_deep(json.loads("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1)))


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 2**200])
def test_what_msgpack_cannot_hold_is_found(number: int, tmp_path: Path) -> None:
    with pytest.raises(OverflowError):
        msgspec.msgpack.encode(number)
    assert too_large({"a": [0.5, "x", None, (number,)]})
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "?", "answer": 1}}\n{{"prompt": "?", "answer": {number}}}\n')
    with pytest.raises(DataError, match=r"a.jsonl:2: it has an integer beyond 64 bits; write it as a text"):
        open_prompts(DataArguments(prompt_data=(str(tmp_path / "a.jsonl"),), label_key=None, metadata_key=None))


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 0, True])
def test_what_msgpack_can_hold_is_left_alone(number: int) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(number)) == number
    assert not too_large([number])
