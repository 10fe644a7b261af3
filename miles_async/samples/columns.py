"""The schema of a samples file: one row per branch of a sample, nearly always one per sample.

A row is written as :class:`SampleRow` describes it; :data:`PER_TOKEN` has the columns with an entry per token.
``reader`` returns rows by attempt, position in the group, and branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from miles_async.runtime.json_texts import decoded
from miles_async.types import FinishReason, JsonObject

if TYPE_CHECKING:
    import pyarrow

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning or goes; new columns don't raise it."""

METADATA_KEY = b"miles_async.samples"
"""Key of the Parquet metadata of a file under which a :class:`FileNote` stands, as JSON."""

Kind = Literal["train", "eval"]

MASK_REASONS = (
    "carries loss",
    "prompt",
    "message or template",
    "loss in another branch",
    "forced by the grammar",
    "sampled, without loss",
)
"""Reasons that ``SampleRow.mask_reasons`` indexes; 0 where ``loss_mask`` is 1. "Message or template": not sampled by a
model, such as a tool's result. "Forced by the grammar": no other token was allowed.
"""
LOSS, PROMPT, NOT_SAMPLED, OTHER_BRANCH, FORCED, SAMPLED = range(len(MASK_REASONS))


class FileNote(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a samples file."""

    schema: int = SCHEMA_VERSION
    kind: Kind
    step: int
    groups: int  # of the step's batch, or prompts of the evaluation, that could have been written
    groups_written: int
    why_fewer: str | None = None  # a sentence; None: all were written
    asked: dict[str, int] = {}  # of an evaluation: data set → samples that were asked for


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a row that the model sampled in one turn."""

    start: int
    end: int
    started_at: float | None = None  # Unix time of the request; None: unknown
    seconds: float | None = None  # until the turn was whole


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The columns without an entry per token."""

    kind: Kind
    step: int  # train: the rollout step, from 1; eval: rollout steps behind the evaluated weights, from 0
    data_set: str | None  # eval: the name in --eval-prompt-data; train: None
    prompt_id: str  # as in the ledger
    attempt_id: int  # as in the ledger; its samples are one group. eval: negative, one per prompt of the evaluation
    epoch: int
    sample: int  # position in the group, from 0
    branch: int  # position in the sample, from 0
    samples: int  # in the group
    branches: int  # of the sample

    reward: float | None  # None: a sample that has none, such as an example of supervised training
    reward_parts: str | None  # JSON object: parts of the reward, and metrics of an environment; None: none
    finish_reason: FinishReason
    truncated: bool  # ended by a limit on its length
    filtered: str | None  # why the group was not trained on (--group-filter-path and the like); None: it was
    prompt_length: int  # tokens
    length: int  # tokens after the prompt
    loss_tokens: int

    issued_version: int  # weight version that was visible when the attempt was admitted
    target_version: int | None  # the optimizer steps from it; None: not trained
    oldest_version: int | None  # of the tokens of this branch that carry loss
    newest_version: int | None
    age: int | None  # target_version - oldest_version

    advantage: float | None  # mean over the tokens that carry loss
    logprob_difference: float | None  # mean of |trainer - engine| over these tokens; None: unknown
    written_at: float  # Unix time

    prompt: str  # as the chat template rendered it
    response: str
    label: str | None  # JSON if there are several
    messages: str | None  # JSON list, in the form of chat completions (role, content, reasoning_content, tool_calls,
    # tool_call_id, ...), the model's replies included; None: a prompt without messages
    prompt_metadata: str  # JSON
    metadata: str  # of the sample, JSON, without what has columns

    def conversation(self) -> list[tuple[str, str]]:
        """(role, text) of each message; of a prompt without messages its text and the response."""
        messages = None if self.messages is None else decoded(self.messages)
        if not isinstance(messages, list):
            return [("prompt", self.prompt), ("response", self.response)]
        return [part for message in messages if isinstance(message, dict) for part in _parts(message)]


class SampleRow(SampleSummary, frozen=True, kw_only=True):
    """All columns. Lists have an entry per token, prompt included, T = prompt_length + length."""

    turns: list[Turn]
    tokens: list[int]  # [T]
    token_texts: list[str]  # [T] the tokens one by one; part of a character: U+FFFD
    loss_mask: list[int]  # [T] 1: carries loss
    mask_reasons: list[int]  # [T] index into MASK_REASONS
    weight_versions: list[int]  # [T] NO_VERSION (-1) where no engine sampled the token
    rollout_logprobs: list[float]  # [T] by the engine; 0 where loss_mask is 0
    advantages: list[float] | None = None  # [T] 0 where loss_mask is 0; None: not trained
    trainer_logprobs: list[float] | None = None  # [T] before the step, 0 where loss_mask is 0; None: not computed
    entropies: list[float] | None = None  # [T] of the trainer's distribution, nats, likewise; None: not computed
    teacher_logprobs: list[float] | None = None  # [T] of --use-opd
    token_rewards: list[float] | None = None  # [T] on top of the sample's reward

    def ages(self) -> list[int | None]:
        """Age of each token, [T]: None where no engine sampled it, or where the row is not of training."""
        target = self.target_version
        return [target - version if target is not None and version >= 0 else None for version in self.weight_versions]


def _parts(message: JsonObject) -> Iterator[tuple[str, str]]:
    role, content = str(message.get("role", "message")), message.get("content")
    if reasoning := message.get("reasoning_content"):
        yield f"{role}, reasoning", str(reasoning)
    if content not in (None, ""):
        yield role, content if isinstance(content, str) else _json(content)
    if calls := message.get("tool_calls"):
        yield f"{role}, tool calls", _json(calls)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


PER_TOKEN = tuple(name for name in SampleRow.__struct_fields__ if name not in SampleSummary.__struct_fields__)
"""Columns of lists, ``turns`` among them: what a list of samples need not read."""


def arrow_schema() -> pyarrow.Schema:
    """The Parquet schema of a file, without its note."""
    import pyarrow as arrow

    turn = arrow.struct(
        [
            ("start", arrow.int32()),
            ("end", arrow.int32()),
            ("started_at", arrow.float64()),
            ("seconds", arrow.float32()),
        ]
    )
    types = {
        **dict.fromkeys(SampleSummary.__struct_fields__, arrow.int64()),
        **dict.fromkeys(_TEXTS, arrow.string()),
        **dict.fromkeys(("reward", "advantage", "logprob_difference", "written_at"), arrow.float64()),
        "truncated": arrow.bool_(),
        **dict.fromkeys(PER_TOKEN, arrow.list_(arrow.float32())),
        "turns": arrow.list_(turn),
        "token_texts": arrow.list_(arrow.string()),
        **dict.fromkeys(("tokens", "weight_versions"), arrow.list_(arrow.int32())),
        **dict.fromkeys(("loss_mask", "mask_reasons"), arrow.list_(arrow.uint8())),
    }
    return arrow.schema([(name, types[name]) for name in SampleRow.__struct_fields__])


_TEXTS = (
    *("kind", "data_set", "prompt_id", "reward_parts", "finish_reason", "filtered"),
    *("prompt", "response", "label", "messages", "prompt_metadata", "metadata"),
)
