"""Rows of a group's samples: what the run knows of each token, and why those without loss have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from miles_async.samples.columns import (
    FORCED,
    LOSS,
    NOT_SAMPLED,
    OTHER_BRANCH,
    PROMPT,
    SAMPLED,
    Kind,
    SampleRow,
    Turn,
)
from miles_async.types import (
    NO_VERSION,
    Branch,
    Float32,
    Group,
    Int32,
    JsonObject,
    Label,
    Sample,
    TokenScores,
    TurnSpan,
    UInt8,
)

OWN_COLUMNS = ("messages", "metrics", "turn_spans")
"""Keys of a sample's metadata that become columns."""

Decode = Callable[[Sequence[int]], str]
"""All tokens of a text, special ones too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTexts:
    """The text of tokens one by one, decoded once each."""

    decode: Decode
    _known: dict[int, str] = field(default_factory=dict)

    def of(self, tokens: Sequence[int]) -> list[str]:
        """One text per token."""
        known = self._known
        for token in tokens:
            if token not in known:  # a difference of sets would look at all that are known
                known[token] = self.decode([token])
        return [*map(known.__getitem__, tokens)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Facts shared by a group's rows, besides the group."""

    kind: Kind
    step: int
    data_set: str | None = None
    target_version: int | None = None
    filtered: str | None = None
    written_at: float  # Unix time


def rows_of(
    group: Group,
    place: Place,
    texts: TokenTexts,
    *,
    advantages: Sequence[Float32] = (),
    scores: Sequence[TokenScores | None] = (),
    first: int = 0,
    samples: int = 0,
) -> Iterator[SampleRow]:
    """One row per branch of each sample of a group.

    ``advantages``: [T] of each branch, in order; () if the group is not trained on. ``scores``: likewise; None where
    the trainer has none. ``first``: position of the first sample, and ``samples`` in the whole group, where ``group``
    has a part of it.
    """
    each_advantages, each_scores = iter(advantages), iter(scores)
    for position, sample in enumerate(group.samples, first):
        for number, branch in enumerate(sample.branches):
            fields = {
                **_of_group(group, place, samples or len(group.samples)),
                **_of_sample(group, sample, texts.decode),
                **_of_branch(branch, place, next(each_advantages, None), next(each_scores, None)),
                **_of_tokens(branch, _spans(sample, number, branch), texts),
                "sample": position,
                "branch": number,
            }
            yield msgspec.convert(fields, SampleRow)


def without_sampling(row: SampleRow) -> SampleRow:
    """The row of an example of supervised training, without its placeholder reward, versions and log-probs."""
    sampled = ("reward", "target_version", "oldest_version", "newest_version", "age", "logprob_difference")
    unknown = dict.fromkeys(sampled)
    versions = [NO_VERSION] * len(row.tokens)
    return msgspec.structs.replace(row, **unknown, weight_versions=versions, turns=[])


def _of_group(group: Group, place: Place, samples: int) -> dict[str, object]:
    attempt, prompt = group.attempt, group.attempt.prompt
    return {
        "kind": place.kind,
        "step": place.step,
        "data_set": place.data_set,
        "target_version": place.target_version,
        "filtered": place.filtered,
        "written_at": place.written_at,
        "prompt_id": prompt.prompt_id,
        "attempt_id": attempt.attempt_id,
        "epoch": attempt.epoch,
        "issued_version": attempt.issued_version,
        "samples": samples,
        "prompt": prompt.text,
        "label": _label(prompt.label),
        "prompt_metadata": _json(prompt.metadata),
    }


def _of_sample(group: Group, sample: Sample, decode: Decode) -> dict[str, object]:
    known: JsonObject = sample.metadata
    parts = known.get("metrics")
    text = sample.text or decode(sample.tokens[sample.prompt_length :].tolist())  # examples have no separate text
    messages = known.get("messages") or _answered(group.attempt.prompt.messages, text)
    return {
        "branches": len(sample.branches),
        "reward": None if sample.reward is None else float(sample.reward),
        "reward_parts": _json(parts) if parts else None,
        "finish_reason": sample.finish_reason,
        "truncated": sample.finish_reason == "length",
        "response": text,
        "messages": _json(messages) if messages else None,
        "metadata": _json({name: value for name, value in known.items() if name not in OWN_COLUMNS}),
    }


def _of_branch(
    branch: Branch, place: Place, advantages: Float32 | None, scores: TokenScores | None
) -> dict[str, object]:
    logprobs, entropies = (scores.logprobs, scores.entropies) if scores is not None else (None, None)
    carries = branch.loss_mask != 0
    versions = branch.weight_versions[carries]
    known = versions[versions >= 0]
    oldest = int(known.min()) if len(known) else None
    of_loss = advantages[carries] if advantages is not None else np.empty(0)
    return {
        "prompt_length": branch.prompt_length,
        "length": branch.response_length,
        "loss_tokens": int(carries.sum()),
        "oldest_version": oldest,
        "newest_version": int(known.max()) if len(known) else None,
        "age": None if place.target_version is None or oldest is None else place.target_version - oldest,
        "advantage": float(of_loss.mean()) if len(of_loss) else None,
        "logprob_difference": None
        if logprobs is None
        else float(np.abs(logprobs - branch.rollout_logprobs)[carries].mean()),
        "advantages": None if advantages is None else advantages.tolist(),
        "trainer_logprobs": None if logprobs is None else logprobs.tolist(),
        "entropies": None if entropies is None else entropies.tolist(),
    }


def _of_tokens(branch: Branch, turns: Sequence[TurnSpan], texts: TokenTexts) -> dict[str, object]:
    tokens: list[int] = branch.tokens.tolist()
    return {
        "turns": [_turn(span) for span in turns],
        "tokens": tokens,
        "token_texts": texts.of(tokens),
        "loss_mask": branch.loss_mask.tolist(),
        "mask_reasons": mask_reasons(branch, turns).tolist(),
        "weight_versions": branch.weight_versions.tolist(),
        "rollout_logprobs": branch.rollout_logprobs.tolist(),
        "teacher_logprobs": None if branch.teacher_logprobs is None else branch.teacher_logprobs.tolist(),
        "token_rewards": None if branch.token_rewards is None else branch.token_rewards.tolist(),
    }


def _turn(span: TurnSpan) -> Turn:
    begun, done = span.started_at, span.finished_at
    seconds = None if begun is None or done is None else float(np.float32(done - begun))
    return Turn(start=span.start, end=span.end, started_at=begun, seconds=seconds)


def _spans(sample: Sample, number: int, branch: Branch) -> list[TurnSpan]:
    """Turns of a branch as its generation noted them, else the runs of tokens that have a version."""
    noted = sample.metadata.get("turn_spans")
    if isinstance(noted, Sequence) and number < len(noted):
        return [TurnSpan(*span) for span in noted[number]]
    return [TurnSpan(start, end) for start, end in _runs(branch.weight_versions)]


def _runs(versions: Int32) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], versions >= 0, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def mask_reasons(branch: Branch, turns: Sequence[TurnSpan]) -> UInt8:
    """uint8 [T]: why each token carries no loss, as an index into ``columns.MASK_REASONS``."""
    reasons = np.full(len(branch.tokens), NOT_SAMPLED, np.uint8)
    reasons[: branch.prompt_length] = PROMPT
    for turn in turns:
        reasons[turn.start : turn.end] = OTHER_BRANCH if turn.elsewhere else FORCED if turn.constrained else SAMPLED
    reasons[branch.loss_mask != 0] = LOSS
    return reasons


def _answered(messages: Sequence[JsonObject], text: str) -> Sequence[JsonObject]:
    if not messages or messages[-1].get("role") == "assistant":
        return messages
    return [*messages, {"role": "assistant", "content": text}]


def _label(label: Label | None) -> str | None:
    return _json(label) if isinstance(label, tuple) else label


def _json(value: Mapping[str, object] | Sequence[object]) -> str:
    """Write objects in users' metadata that JSON lacks as Python shows them."""
    return msgspec.json.encode(value, enc_hook=repr).decode()
