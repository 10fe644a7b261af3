"""What users of the library implement: rewards, filters, generation, environments, agents, losses, trackers, backends.

A hook is named on the command line as ``module:attr``, loaded once at the start and checked against its protocol here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles_async.types import (
    AssistantTurn,
    Attempt,
    GenerateRequest,
    Generation,
    Group,
    Observation,
    Prompt,
    Sample,
    TrainShard,
)

Metrics = Mapping[str, float]


class EngineClient(Protocol):
    """Token-in-token-out generation through the router."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Carry out one generation call, with retries of transient errors within the client's budget.

        Raises TransientEngineError when the budget is spent, RequestRejectedError, VersionUnknownError.
        An abort is a Generation with finish_reason "abort" and partial output, not an exception.
        """
        ...


@runtime_checkable
class Generate(Protocol):
    """``--custom-generate-function-path module:attr``: one trajectory of one prompt."""

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample: ...


@runtime_checkable
class Environment(Protocol):
    """What the model acts on, one object per episode: there is nothing to reset. Closed when the episode ends, however
    it does.
    """

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """What the model is offered, as chat completions have it; () for none."""
        ...

    async def step(self, turn: AssistantTurn) -> Observation:
        """Answer the model's turn. Whatever it raises costs its attempt, not the run. With
        ServiceUnavailableError (or OSError, such as ConnectionError and TimeoutError) the episode begins again when the
        service is back.
        """
        ...

    async def close(self) -> None: ...


class MakeEnvironment(Protocol):
    """``--environment-path module:attr``: the class of an environment, or a function that makes one."""

    def __call__(self, prompt: Prompt) -> Environment: ...


@runtime_checkable
class Agent(Protocol):
    """``--agent-path module:attr``: solves a prompt by chat completions at ``base_url``.

    Returns what it has to say of the turns that it took (a number, say), or that and its reward: (turns, reward).
    Without a reward, the run's reward decides.
    """

    async def __call__(self, base_url: str, prompt: Prompt) -> Any: ...


@runtime_checkable
class Reward(Protocol):
    """``--custom-rm-path module:attr``: the reward of one sample. Raises RewardError (or anything) on failure, and
    ServiceUnavailableError (or OSError, such as ConnectionError and TimeoutError) if a service that it needs is down:
    it is asked again when that is back.
    """

    async def __call__(self, prompt: Prompt, sample: Sample) -> float: ...


@runtime_checkable
class GroupFilter(Protocol):
    """Says why a rewarded group must not be trained on, or None to keep it."""

    def __call__(self, group: Group) -> str | None: ...


class PolicyLoss(Protocol):
    """The loss of one micro-batch; torch tensors in and out (typed Any: this module doesn't import torch)."""

    needs_old_logprobs: bool  # an extra forward pass before the first optimizer step is required
    needs_reference: bool
    needs_entropy: bool  # a pass over all logits, for a metric or a bonus

    def __call__(self, logprobs: Any, entropy: Any | None, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Sum over loss tokens of the loss, and metric sums.

        ``logprobs``, ``entropy``: float32 [N], of ``tokens[i]`` given its prefix (0 for the first token of
        each sample); ``entropy`` is None unless it is needed. ``batch``: the arrays of the TrainBatch as tensors,
        ``advantages`` expanded to [N], plus ``old_logprobs`` and ``ref_logprobs`` [N] where needed. Metrics are sums
        over loss tokens, except names ending in ``_max``.
        """
        ...


class TrainBackend(Protocol):
    """One rank of the training engine (``backends/megatron``), found by entry point ``miles_async.backends``."""

    data_parallel_rank: int
    pipeline_stage: int | None  # on the first rank of a pipeline stage, which may send weights; None on others

    def train(self, shard: TrainShard) -> dict[str, float]: ...

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float | None = None) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, at the rollout temperature unless given. Collective."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        """(HF name, torch tensor) in a fixed order, on every rank. Collective."""
        ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None:
        """Restore what :meth:`save` wrote, in this layout of ranks or another. Settings of the optimizer are flags',
        whatever they were. Raises CheckpointError.
        """
        ...

    def save_hf(self, directory: Path) -> None: ...


class Tracker(Protocol):
    """Where metrics go. Must never block or raise into training."""

    def log(self, metrics: Metrics, *, step: int) -> None: ...

    def finish(self) -> None: ...
