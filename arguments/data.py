"""Prompt data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

BadRows = Literal["refuse", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataArguments:
    """Prompts"""

    prompt_data: Path | None = flag(None, "prompts, .jsonl or .parquet (required)")
    input_key: str = flag("prompt", "column with the prompt: a text, or a list of {role, content} messages")
    label_key: str | None = flag("label", "column with the answer that the reward compares with; none: no labels")
    metadata_key: str | None = flag(None, "column with anything else that rewards or environments need")
    prompt_id_key: str | None = flag(None, "column with a unique id (default: file name and row number)")
    apply_chat_template: bool = flag(True, "render messages with the tokenizer's chat template")
    bad_rows: BadRows = flag(
        "refuse", "rows that the chat template refuses: refuse the file, or skip and count them while the run goes on"
    )
    rollout_shuffle: bool = flag(True, "shuffle prompts, in another order every epoch")
    rollout_seed: int = flag(42, "seed of the shuffle")
    rollout_max_prompt_len: int | None = flag(
        None, "prompts with more tokens are skipped and counted (default: the model's limit)"
    )
