"""Records from a prompt to a group of finished samples.

Per-token arrays of a sample are aligned with ``tokens`` (prompt and response together): entry ``i`` of
``loss_mask``, ``rollout_logprobs`` and ``weight_versions`` describes ``tokens[i]``. The logits that
predict ``tokens[i]`` are those at position ``i - 1``; only the trainer shifts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from miles_async.errors import VersionUnknownError
from miles_async.types.pictures import Picture

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
RoutedExperts = npt.NDArray[np.uint8 | np.int16]
"""[T, layers × top-k] experts by which each layer of a mixture passed each token on (``arguments/routing.py``)."""

NO_VERSION = -1
"""Entry of ``Sample.weight_versions`` for tokens that no engine generated (prompt, tool output)."""

HIGHEST_LOGPROB = 1e-3
"""Probabilities end at 1; the rest is rounding."""

JsonObject = Mapping[str, Any]
"""JSON from elsewhere: chat messages, tools, sampling parameters, metadata, a model's config.json."""

FinishReason = Literal["stop", "length", "abort"]


Label = str | tuple[str, ...]
"""The answer, or several accepted answers."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the prompt data.

    >>> Prompt(prompt_id="train.jsonl:7", token_ids=(1, 4, 29, 5), text="rev 12", label="21")
    """

    prompt_id: str  # unique within the prompt data
    token_ids: tuple[int, ...]  # rendered by the chat template, ready for the engine; an image is many tokens
    text: str  # as rendered, for rewards and logs
    messages: tuple[JsonObject, ...] = ()  # as rendered, for environments and agents
    label: Label | None = None
    metadata: JsonObject = {}
    pictures: tuple[Picture, ...] = ()  # in the order of the image parts of its messages


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation call.

    >>> GenerateRequest(input_ids=np.array([5, 6], np.int32), sampling={"max_new_tokens": 4}, routing_key="12.0")
    """

    input_ids: Int32  # [P] everything that the model is to continue
    sampling: JsonObject  # the engine's sampling parameters
    routing_key: str  # requests with the same key go to the same engine, whose prefix cache has what they share
    pictures: tuple[Picture, ...] = ()  # of the prompt, in order; each has a run of ``image_token`` in input_ids
    image_token: int | None = None  # None: no pictures
    experts_from: int = 0  # first token whose experts are asked for, by runs that replay them
    text_from: int = 0  # first token of the text that is asked for: the beginning of the model's turn
    decoder_id: int | None = None  # ``runtime.detokenize.fingerprint`` of the tokenizer that makes it; None: no text


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that engines sampled: the answer to one call, or a turn of the model made of several (``take_turn``)."""

    output_ids: Int32  # [T]
    logprobs: Float32  # [T], of the sampled tokens under the sampling distribution
    weight_versions: Int32  # [T]
    finish_reason: FinishReason  # of a turn "stop" or "length"
    engines: tuple[str, ...] = ()  # in order of first use
    chunks: int = 1  # generation calls: 1 + aborts survived
    prompt_tokens: int = 0  # over all chunks
    cached_tokens: int = 0  # of these, served from the prefix cache
    text: str | None = None  # of the tokens from ``text_from`` on, special ones too; None if the engine gave none
    routed_experts: RoutedExperts | None = None  # of prompt and output from ``experts_from`` up to the last but one
    constrained: bool = False  # sampled under a grammar: log-probs of the policy restricted to it
    started_at: float | None = None  # Unix time of the first request; None: not noted
    finished_at: float | None = None  # of the last answer


class TurnSpan(NamedTuple):
    """Tokens [start, end) of a branch that the model sampled in one turn. ``turn_spans`` of a sample's metadata has a
    list of them per branch, each as a list.
    """

    start: int
    end: int
    elsewhere: bool = False  # they carry loss in another branch
    constrained: bool = False  # see ``Generation``
    started_at: float | None = None
    finished_at: float | None = None


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One way through a trajectory, from the prompt to a last token: one sequence for the trainer.

    Its arrays become read-only, the caller's too, or are copied: rewards and filters see what is trained on.
    """

    tokens: Int32  # [T] prompt and response
    prompt_length: int
    loss_mask: UInt8  # [T] 1 where the token carries loss: the model sampled it, and no branch before has it
    rollout_logprobs: Float32  # [T] 0 where loss_mask is 0
    weight_versions: Int32  # [T] NO_VERSION where no engine generated the token
    routed_experts: RoutedExperts | None = None  # [T, ...] 0 for the last token, which no engine has read
    teacher_logprobs: Float32 | None = None  # [T] by the teacher of --use-opd, 0 where loss_mask is 0
    token_rewards: Float32 | None = None  # [T] on top of the sample's reward, 0 where loss_mask is 0; None: all 0
    pictures: tuple[Picture, ...] = ()  # in the order of their tokens, none of which carries loss

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    def loss_tokens(self) -> slice | npt.NDArray[np.bool_]:
        """Index of the tokens that carry loss in every per-token array: a slice, which copies nothing, if they are
        the last ones.
        """
        mask, count = self.loss_mask, np.count_nonzero(self.loss_mask)
        last = slice(len(mask) - count, None)
        return last if np.count_nonzero(mask[last]) == count else mask != 0

    def loss_versions(self) -> Int32:
        """int32 [L], versions of the tokens that carry loss.

        Raises VersionUnknownError: no token does, so there is nothing to train on, or one that does has no version.
        """
        return known(self.weight_versions[self.loss_tokens()])

    def __post_init__(self) -> None:
        """Make the arrays read-only, in place: they may be long. A view is copied, since its buffer stays writable; one
        of experts is too large for that.
        """
        for name in Branch.__struct_fields__:
            if isinstance(value := getattr(self, name), np.ndarray):
                if value.flags.writeable and value.base is not None and name != "routed_experts":
                    msgspec.structs.force_setattr(self, name, value := value.copy())
                value.flags.writeable = False


class Sample(Branch, frozen=True, kw_only=True):
    """One finished trajectory of a prompt. Built once, by ``rollout.generate``; never changed.

    Where the history that the model was given was edited or truncated, the trajectory has several branches: the sample
    is the first of them, ``more_branches`` are the others. They share text, reward and advantage, and each has tokens
    that carry loss. Whatever counts or compares samples sees one.
    """

    text: str  # response as sampled, without tokens at its ends that bound a text (end of turn, <bos>, padding)
    finish_reason: FinishReason
    reward: float | None = None
    metadata: JsonObject = {}
    more_branches: tuple[Branch, ...] = ()

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All of them."""
        return (self, *self.more_branches)

    @property
    def longest_response(self) -> int:
        """Number of tokens after the prompt in the longest branch: its length, which limits and metrics go by."""
        return max(branch.response_length for branch in self.branches)


class TokenRewards(msgspec.Struct, frozen=True, kw_only=True):
    """A reward of a sample and, on top of it, of single tokens (process rewards)."""

    reward: float  # of the sample
    tokens: tuple[Float32, ...]  # per branch [T], aligned with its tokens, 0 where no loss is carried


class RewardParts(msgspec.Struct, frozen=True, kw_only=True):
    """A reward of a sample and the numbers that it was made of, which are logged as ``rollout/NAME/mean`` and shown."""

    reward: float
    parts: Mapping[str, float]


Rewarded = float | TokenRewards | RewardParts
"""Return types of a reward."""


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model, as an environment sees it."""

    index: int  # 0 for the first
    message: JsonObject  # role, content, and if they could be read: tool_calls, reasoning_content
    text: str  # all of it, as ``Sample.text``
    finish_reason: FinishReason  # "length": it was cut


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's answer to a turn."""

    messages: tuple[JsonObject, ...] = ()  # to append before the next turn: of the user, tools or the system
    done: bool = False  # the episode is over; messages are not looked at
    reward: float | None = None  # of the episode; None: the run's reward decides
    turn_reward: float = 0.0  # of this turn, on top of that; for --advantage-estimator token_rewards
    metrics: Mapping[str, float] = {}  # added up over the episode, logged as rollout/NAME/mean: {"tool_errors": 1}


UNISSUED = -1
"""Id of an attempt that waits to be admitted."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a prompt: the unit that is admitted, generated, buffered and accounted for.

    ``attempt_id`` is unique in a run directory (``prompt_id`` repeats in every epoch and in every retry), so
    overlapping epochs never mix prompts. It rises in order of admission; the cut takes oldest first. What waits to be
    admitted, for the first time or again, has none yet.
    """

    prompt: Prompt
    epoch: int
    attempt_id: int = UNISSUED
    data_failures: int = 0  # earlier tries of this prompt that ended for its own fault
    infra_failures: int = 0  # earlier tries that engines or network ended
    stale_count: int = 0  # earlier tries that were too old
    history: tuple[str, ...] = ()  # why each earlier try ended; becomes the dead letter's reasons (C6)
    issued_version: int = 0  # weight version visible when this attempt was admitted


class Group(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The finished samples of one attempt, rewarded; compared together by GRPO. Never empty."""

    attempt: Attempt
    samples: tuple[Sample, ...]
    oldest_version: int  # over the tokens of all samples that carry loss
    newest_version: int
    stopped: int = 0  # samples that were still being generated when enough were finished
    aborted: int = 0  # samples that had become too old while they were generated, and were ended

    @cached_property
    def columns(self) -> Int64:
        """Computed once, by :func:`columns_of`."""
        return columns_of(self.samples)


def columns_of(samples: Sequence[Sample]) -> Int64:
    """Facts that a batch needs about the tokens of each branch of a group's samples, int64 [B, 7].

    The columns: position of the sample in the group, tokens of the prompt, tokens, tokens that carry loss; their oldest
    version, their newest version, and 1 if all of them have a finite log-prob.

    Raises VersionUnknownError as ``Branch.loss_versions`` does.
    """
    return np.array([_columns(branch, i) for i, sample in enumerate(samples) for branch in sample.branches])


def _columns(branch: Branch, sample: int) -> tuple[int, ...]:
    length = len(branch.tokens)
    lengths = (length, len(branch.loss_mask), len(branch.rollout_logprobs), len(branch.weight_versions))
    assert lengths.count(length) == len(lengths), f"per-token arrays of a sample differ in length: {lengths}"
    carry_loss = branch.loss_tokens()
    versions, logprobs = known(branch.weight_versions[carry_loss]), branch.rollout_logprobs[carry_loss]
    oldest, newest = int(np.minimum.reduce(versions)), int(np.maximum.reduce(versions))
    finite = math.isfinite(logprobs.dot(logprobs)) or bool(np.isfinite(logprobs).all())
    return sample, branch.prompt_length, length, len(versions), oldest, newest, finite


def known(versions: Int32) -> Int32:
    """The versions of the tokens that carry loss, none of them unknown."""
    if not len(versions):
        raise VersionUnknownError("expected at least one token that carries loss, found none: the sample has no age")
    if np.minimum.reduce(versions) <= NO_VERSION:
        raise VersionUnknownError("expected a weight version for every token that carries loss, found one without")
    return versions
