"""The nouns of the flow: prompt → sample → group → train batch. All frozen, all plain data.

A prompt is immutable and a sample is a separate record, so "reset for retry" does not exist: a retry is
a new attempt of the same prompt with nothing to clear.

Per-token arrays of a sample are aligned with ``tokens`` (prompt and response together): entry ``i`` of
``loss_mask``, ``rollout_logprobs`` and ``weight_versions`` describes ``tokens[i]``. The logits that
predict ``tokens[i]`` are those at position ``i - 1``; the trainer does that shift, nobody else.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
RoutedExperts = npt.NDArray[np.uint8 | np.int16]
"""[T, layers × top-k] experts by which each layer of a mixture passed each token on (``arguments/routing.py``)."""

NO_VERSION = -1
"""Entry of ``Sample.weight_versions`` for tokens that no engine generated (prompt, tool output)."""

JsonObject = Mapping[str, Any]
"""JSON of somebody else's making: chat messages, tools, sampling parameters, metadata, a model's config.json."""

FinishReason = Literal["stop", "length", "abort"]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the prompt data.

    >>> Prompt(prompt_id="train.jsonl:7", token_ids=(1, 4, 29, 5), text="rev 12", label="21")
    """

    prompt_id: str  # unique within the prompt data
    token_ids: tuple[int, ...]  # rendered by the chat template, ready for the engine
    text: str  # what was rendered, for rewards and logs
    messages: tuple[JsonObject, ...] = ()  # what was rendered, for environments and agents
    label: str | None = None
    metadata: JsonObject = {}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation call.

    >>> GenerateRequest(input_ids=np.array([5, 6], np.int32), sampling={"max_new_tokens": 4}, routing_key="12.0")
    """

    input_ids: Int32  # [P] everything that the model is to continue
    sampling: JsonObject  # the engine's sampling parameters
    routing_key: str  # requests with the same key go to the same engine, whose prefix cache has what they share
    multimodal_inputs: JsonObject = {}  # fields that the engine's request has for them; opaque to us
    experts_from: int = 0  # first token whose experts are asked for, by runs that replay them


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) of one generation call came from weight version ``version``."""

    version: int
    start: int
    end: int


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of an engine to one generation call (a turn, or one chunk of an interrupted turn)."""

    output_ids: Int32  # [T]
    logprobs: Float32  # [T], of the sampled tokens under the sampling distribution
    spans: tuple[VersionSpan, ...]  # cover [0, T) without gaps
    finish_reason: FinishReason
    engine_id: str
    cached_tokens: int  # prompt tokens served from the prefix cache
    prompt_tokens: int
    routed_experts: RoutedExperts | None = None  # of prompt and output from ``experts_from`` up to the last but one


class ServerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of an inference server to one generation call, before its versions are judged."""

    output_ids: Int32  # [T]
    logprobs: Float32  # [T]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    weight_version: object  # version label as the server reports it; ``staleness.versions.parse_spans`` judges both
    weight_versions: object  # spans as the server reports them, None if it reports none
    routed_experts: RoutedExperts | None = None  # flat, as reported


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One way through a trajectory, from the prompt to a last token: one sequence for the trainer."""

    tokens: Int32  # [T] prompt and response
    prompt_length: int
    loss_mask: UInt8  # [T] 1 where the token carries loss: the model sampled it, and no branch before has it
    rollout_logprobs: Float32  # [T] 0 where loss_mask is 0
    weight_versions: Int32  # [T] NO_VERSION where no engine generated the token
    routed_experts: RoutedExperts | None = None  # [T, ...] 0 for the last token, which no engine has read
    teacher_logprobs: Float32 | None = None  # [T] by the teacher of --use-opd, 0 where loss_mask is 0

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length


class Sample(Branch, frozen=True, kw_only=True):
    """One finished trajectory of a prompt. Built once, by ``rollout.generate``; never changed.

    Where the history that the model was given was edited or truncated, the trajectory has several branches: the sample
    is the first of them, ``more_branches`` are the others. They share text, reward and advantage, and each has tokens
    that carry loss. Whatever counts or compares samples sees one.
    """

    text: str  # response text, special tokens removed
    finish_reason: FinishReason
    reward: float | None = None
    metadata: JsonObject = {}
    more_branches: tuple[Branch, ...] = ()

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All of them."""
        return (self, *self.more_branches)


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model, as an environment sees it."""

    index: int  # 0 for the first
    message: JsonObject  # role, content, and if they could be read: tool_calls, reasoning_content
    text: str  # all of it, without special tokens
    finish_reason: FinishReason  # "length": it was cut


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's answer to a turn."""

    messages: tuple[JsonObject, ...] = ()  # to append before the next turn: of the user, tools or the system
    done: bool = False  # the episode is over; messages are not looked at
    reward: float | None = None  # of the episode; None: the run's reward decides
    metrics: Mapping[str, float] = {}  # added up over the episode, logged as rollout/NAME/mean: {"tool_errors": 1}


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a prompt: the unit that is admitted, generated, buffered and accounted for.

    ``attempt_id`` is unique in a run directory (``prompt_id`` repeats in every epoch and in every retry), so
    overlapping epochs never mix prompts. It rises in order of admission; the cut takes oldest first.
    """

    attempt_id: int
    prompt: Prompt
    epoch: int
    data_failures: int = 0  # earlier tries of this prompt that ended for its own fault
    infra_failures: int = 0  # earlier tries that engines or network ended
    stale_count: int = 0  # earlier tries that were too old
    history: tuple[str, ...] = ()  # why each earlier try ended; becomes the dead letter's reasons (C6)
    issued_version: int = 0  # weight version visible when this attempt was admitted


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The finished samples of one attempt, rewarded; compared together by GRPO. Never empty."""

    attempt: Attempt
    samples: tuple[Sample, ...]
    oldest_version: int  # over the tokens of all samples that carry loss
    newest_version: int
    stopped: int = 0  # samples that were still being generated when enough were finished
    aborted: int = 0  # samples that had become too old while they were generated, and were ended


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All branches of samples, flattened: per-token arrays of length N = offsets[-1], branch s is
    [offsets[s], offsets[s + 1]).

    >>> batch.tokens[batch.offsets[s] : batch.offsets[s + 1]]   # the tokens of branch s

    Every token that carries loss has an advantage. An estimator that gives all tokens of a sample the same is kept as
    one number per branch, [S], which costs nothing per token; one that tells tokens apart is [N], 0 where no loss is
    carried. Trainer ranks expand both to [N] (``train_data.batch.token_advantages``), and so do all losses see them.
    """

    tokens: Int32  # [N]
    offsets: Int64  # [S + 1], offsets[0] == 0
    loss_mask: UInt8  # [N]
    rollout_logprobs: Float32  # [N]
    weight_versions: Int32  # [N] per token, NO_VERSION where no engine generated it
    oldest_versions: Int32  # [S] per branch, over the tokens that carry loss
    advantages: Float32  # [S] or [N], see above
    rewards: Float32  # [S]
    sample_ids: Int64  # [S] the sample's position in the batch before any split; the same for all its branches
    routed_experts: RoutedExperts | None = None  # [N, ...] as in Branch, if they are replayed
    teacher_logprobs: Float32 | None = None  # [N] as in Branch, if there is a teacher

    @property
    def num_branches(self) -> int:
        return len(self.offsets) - 1


class TrainShard(msgspec.Struct, frozen=True, kw_only=True):
    """Training data of one data-parallel rank for one rollout step.

    ``optimizer_steps[i]`` are the micro-batches of the i-th optimizer step, each a TrainBatch packed into one
    sequence of at most ``--max-tokens-per-gpu`` tokens, or one branch that is longer. Every rank has the same number of
    optimizer steps and, within one, the same number of micro-batches, so that collectives line up.
    """

    dp_rank: int
    dp_size: int
    target_version: int  # the version the optimizer steps from (C1)
    optimizer_steps: tuple[tuple[TrainBatch, ...], ...]
    loss_tokens: tuple[int, ...]  # tokens that carry loss per optimizer step, summed over all ranks


class TensorMeta(msgspec.Struct, frozen=True):
    """Name, dtype (torch name without prefix: "float32") and shape of one exported HF tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""  # ``tensor_digest`` of its elements; empty where nobody compares it


class WeightDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Changes since an earlier version: beside each bucket's file one with its changed tensors, encoded."""

    base_version: int
    bucket_bytes: dict[int, int]  # of each bucket's file; 0: nothing changed, and there is none


class StagedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of staged weights and the expected canary scores; or one sender's share of it.

    Its files: ``weights/files.py``. It is their manifest, too, without the canary.
    """

    version: int
    directory: str  # where sender 0 sees its files
    buckets: dict[int, tuple[TensorMeta, ...]]  # in sending order; one file each, tensors in the order of their bytes
    total_bytes: int
    senders: int = 1  # bucket i was staged by sender i % senders, and is sent by it
    delta: WeightDelta | None = None
    canary_tokens: tuple[int, ...] = ()
    canary_logprobs: tuple[float, ...] = ()  # of canary_tokens[1:], by the trainer, with these weights
    previous_canary_logprobs: tuple[float, ...] = ()  # with those it staged before; empty if these are the first
    copy_seconds: float = 0.0  # that training waited: export, copy, canary; longest of the senders
    prepare_seconds: float = 0.0  # and until the files were there


class PreparedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that left the buffer: its shards by reference, and what is known of it."""

    batch_id: int
    target_version: int
    oldest_version: int
    prompt_ids: tuple[str, ...]  # of its groups
    shards: tuple[object, ...]  # per data-parallel rank, a reference (ray.ObjectRef) to a TrainShard
    metrics: Mapping[str, float]  # reward mean, lengths, ages, ...
    ages: Mapping[int, int]  # age → number of samples


class Incarnation(msgspec.Struct, frozen=True, order=True):
    """An engine from one of its starts to its end. Weights are brought to incarnations: a restarted engine has none of
    what was sent before.
    """

    engine: str  # its id
    number: int  # changes whenever what is known of the engine becomes void

    def __str__(self) -> str:
        return self.engine


class FleetMembers(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that a publication concerns."""

    serving: tuple[Incarnation, ...]  # hold the current version and take requests
    joining: tuple[Incarnation, ...]  # up, but their weights are unknown until a publication reaches them
    starting: tuple[str, ...]  # ids of those that are not up yet
    ranks: Mapping[str, int]  # process-group ranks by engine id (its tensor-parallel size)
    bucketwise: frozenset[str] = frozenset()  # ids of those that have to be told to receive each bucket


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current load of an engine."""

    running: int  # requests that generate
    waiting: int  # requests in its queue, those that were put back for want of KV cache included
    kv_use: float  # part of the KV cache that running requests hold, 0 to 1


class CanaryScore(msgspec.Struct, frozen=True):
    """An engine's scores of the canary sequence."""

    weight_version: str
    logprobs: tuple[float, ...]  # of tokens[1:]


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of an HF tensor where one rank of an engine holds it.

    Its element [i, j, ...] is element offset + i · strides[0] + j · strides[1] + ... of the tensor, row by row.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # in which it is held
    digest: str  # of these elements in their places, see ``tensor_digest``; "" where nobody asked for it


class TensorShare(msgspec.Struct, frozen=True):
    """Every ``of``-th tensor, by its name: each is in exactly one of the shares 0 .. ``of`` - 1."""

    index: int = 0
    of: int = 1

    def includes(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self.of == self.index


class HeldWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an engine's model as it reports them, over all its ranks or for one of them."""

    parts: Mapping[str, tuple[HeldPart, ...]]  # by name of the tensor that its loader was given
    other_form: tuple[str, ...] = ()  # tensors that were loaded and are kept otherwise than they were sent
    unfilled: Mapping[str, int] = {}  # parameters of the model → elements that no tensor was copied to, other than 0


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one publication."""

    version: int  # the version that became visible
    sent_version: int  # differs from version only under --debug-publication-lag
    engines: tuple[str, ...]
    fenced: tuple[str, ...]
    copy_seconds: float  # that training waited
    prepare_seconds: float  # with them, all until the pause
    pause_seconds: float
    step_seconds: Mapping[str, float]  # of the pause, by step: "flush_cache", "send", ...
    canary_difference: float  # mean over tokens, largest over engines; 0 when not verified
    canary_undecided: tuple[str, ...] = ()  # engines whose canary fits this version and the one before alike
    compared_tensors: int = 0  # whose elements were compared; least over engines
    incomparable_tensors: int = 0  # that can't be compared, or shall not; most over engines
    total_bytes: int = 0  # of the weights
    sent_fraction: float = 1.0  # of these bytes, what each engine was sent; mean over engines


SessionEnding = Literal["open", "finished", "aborted", "expired"]
"""finished and aborted by its agent or the run; expired: nobody used it."""


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session of the session server, as its agent is given it."""

    session_id: str
    instance_id: str
    url: str
    base_url: str  # for clients of chat completions


class CollectedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an agent's session."""

    ending: SessionEnding
    sample: Sample | None  # of its trajectory; None: it had no turn
    reward: float | None  # that its agent gave
    requests: int  # for chat completions, failed ones too
    cut: bool  # the last request found no room
    failure: str | None  # what engines or network did to the last request
    waiting: bool  # the last request was given up, or is under way


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Engines, their requests and their router at one moment."""

    in_flight: int  # requests
    oldest_request_seconds: float
    busy_seconds: float  # in which any request was in flight
    answers: Mapping[str, int]  # by engine
    failed_tries: int
    engines: str  # each with its state, for people
    router: Mapping[str, float]  # its own metrics, as last read
    restarts: Mapping[str, int]  # by engine


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout side at one moment."""

    balance: Mapping[str, int]  # groups issued, and how many ended or stand where (C2)
    gauges: Mapping[str, float]
    router: Mapping[str, float]  # see EngineStats
    busy_seconds: float  # of ``seconds``, those in which engines generated
    seconds: float  # since the first publication, up to the end of the loop
