"""Prompt data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import ModuleAttr, flag
from miles_async.arguments.prompt_files import named_places, parse_weights

INPUT_KEY, LABEL_KEY = "prompt", "label"

BadRows = Literal["refuse", "skip"]
Sampler = Literal["uniform", "difficulty"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataArguments:
    """Prompts"""

    prompt_data: tuple[str, ...] | None = flag(
        None,
        "prompts: .jsonl (also .gz, .zst) or .parquet files, folders that datasets saved, or "
        "hf:NAME[@REVISION][[:CONFIG]:SPLIT] of the Hugging Face hub; FILE@[0:100] is its first 100 rows; a name "
        "before a file begins the ids of its prompts (required)",
        metavar="[NAME] FILE",
    )
    prompt_data_weights: tuple[str, ...] = flag(
        (),
        "relative shares of the prompt files, one number each, such as 3 1 (default: rows of all files are shuffled "
        "together)",
        metavar="X",
        needs=("prompt_data",),
    )
    input_key: str = flag(
        INPUT_KEY,
        "column with the prompt: a text, or a list of {role, content} messages; a.b is the field b in the column a; "
        "without this flag and --label-key, columns as verl, TRL and ShareGPT have them are recognized",
    )
    label_key: str | None = flag(
        LABEL_KEY,
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
    multimodal_keys: str | None = flag(
        None,
        'column with the images of the prompt, as JSON: {"image": "images"}; each stands where the prompt has <image>',
        metavar="JSON",
    )
    image_root: Path | None = flag(None, "folder in which rows find their images by path", metavar="FOLDER")
    prompt_id_key: str | None = flag(None, "column with a unique id (default: file name and row number)")
    apply_chat_template: bool = flag(True, "render messages with the tokenizer's chat template")
    bad_rows: BadRows = flag(
        "refuse",
        "rows that the chat template refuses, or that have no answer to learn: refuse the file, or skip and count them",
    )
    prompt_sampler: Sampler | ModuleAttr = flag(
        "uniform",
        "which prompts an epoch has, and in which order: uniform (each once), difficulty (prompts that were always or "
        "never solved come less often), or module:attr of your own PromptSampler",
    )
    difficulty_low: float = flag(
        0.0,
        "prompts rest if at most this share of their last group's samples solved them",
        needs=("prompt_sampler=difficulty",),
        at_least=0,
        below=1,
    )
    difficulty_high: float = flag(
        1.0,
        "prompts rest if at least this share solved them",
        needs=("prompt_sampler=difficulty",),
        above=0,
        at_most=1,
    )
    difficulty_rest: int = flag(
        4, "a prompt that rests comes in one of N epochs", metavar="N", needs=("prompt_sampler=difficulty",), at_least=2
    )
    solved_reward: float = flag(
        1.0,
        "smallest reward of a sample that solved its prompt, for pass rates of --prompt-sampler",
        metavar="REWARD",
        needs=("prompt_sampler=difficulty", "prompt_sampler=own"),
    )
    pass_rates: tuple[str, ...] = flag(
        (),
        "directories of earlier runs whose pass rates are known from the start; of several, the last one that has the "
        "prompt decides",
        metavar="RUN_DIR",
        needs=("prompt_sampler=difficulty", "prompt_sampler=own"),
    )
    rollout_shuffle: bool = flag(True, "shuffle prompts, in another order every epoch")
    rollout_seed: int = flag(42, "seed of the shuffle", at_least=0)
    rollout_max_prompt_len: int | None = flag(
        None, "prompts with more tokens are skipped and counted (default: the model's limit)", at_least=1
    )

    @property
    def places(self) -> list[tuple[str | None, str]]:
        """(name before it, file) of ``--prompt-data``. Raises ConfigurationError."""
        return named_places(self.prompt_data or (), "--prompt-data")

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the files; () without ``--prompt-data-weights``. Raises ConfigurationError."""
        words = self.prompt_data_weights
        return parse_weights(words, len(self.places)) if words else ()
