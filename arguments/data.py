"""Prompt data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag
from miles_async.errors import ConfigurationError

SUFFIXES = (".jsonl", ".parquet")

BadRows = Literal["refuse", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataArguments:
    """Prompts"""

    prompt_data: Path | None = flag(
        None, "prompts, .jsonl or .parquet; FILE@[0:100] is its first 100 rows (required)", metavar="FILE"
    )
    input_key: str = flag(
        "prompt",
        "column with the prompt: a text, or a list of {role, content} messages; a.b is the field b in the column a",
    )
    label_key: str | None = flag(
        "label",
        "column with the answer that the reward compares with, or a list of accepted answers; none: no labels",
    )
    metadata_key: str | None = flag(
        None,
        "column with anything else that rewards or environments need; rows may lack it if it is called metadata",
    )
    tool_key: str | None = flag(
        None,
        "column with tools, which the chat template renders with the prompt; rows may lack it if it is called tools",
    )
    prompt_id_key: str | None = flag(None, "column with a unique id (default: file name and row number)")
    apply_chat_template: bool = flag(True, "render messages with the tokenizer's chat template")
    bad_rows: BadRows = flag(
        "refuse", "rows that the chat template refuses: refuse the file, or skip and count them while the run goes on"
    )
    rollout_shuffle: bool = flag(True, "shuffle prompts, in another order every epoch")
    rollout_seed: int = flag(42, "seed of the shuffle", at_least=0)
    rollout_max_prompt_len: int | None = flag(
        None, "prompts with more tokens are skipped and counted (default: the model's limit)", at_least=1
    )


def split_slice(path: Path) -> tuple[Path, slice | None]:
    """File and rows of ``FILE@[FIRST:END]``, as Python slices. Raises ConfigurationError for another text after ``@[``.

    >>> split_slice(Path("train.jsonl@[:100]"))
    (PosixPath('train.jsonl'), slice(None, 100, None))
    """
    name, marked, text = path.name.partition("@[")
    if not marked or path.suffix in SUFFIXES:
        return path, None
    found = re.fullmatch(r"(-?\d*):(-?\d*)\]", text)
    if found is None or "-" in found.groups():
        raise ConfigurationError(f"{path}: expected FILE@[FIRST:END], such as {name}@[0:100] for the first 100 rows")
    first, end = (int(number) if number else None for number in found.groups())
    return path.with_name(name), slice(first, end)
