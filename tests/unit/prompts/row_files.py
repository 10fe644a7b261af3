"""Prompt files of both kinds, and what a source reads from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError
from miles_async.prompts.source import FilePromptSource
from miles_async.types import JsonObject, Prompt
from tests.fakes.chat_formats import chat_format


def write(path: Path, rows: Iterable[JsonObject]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows]), path, row_group_size=3)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(path: Path, **flags: object) -> list[Prompt]:
    template = chat_format("qwen3")
    source = FilePromptSource(DataArguments(prompt_data=(str(path),), **flags), template.encode)
    source.require_rendered(template.check)
    return list(source.all_prompts())


def refusal(path: Path, **flags: object) -> str:
    with pytest.raises(DataError) as caught:
        prompts(path, **flags)
    return str(caught.value)
