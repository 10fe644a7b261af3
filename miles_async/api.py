"""Protocols that users implement: rewards, filters, generation, environments, agents, losses, trackers, backends.

A hook is named on the command line as ``module:attr``, loaded once at the start and checked against its protocol here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from miles_async.errors import ContractViolation
from miles_async.types import (
    AssistantTurn,
    Attempt,
    Float32,
    GenerateRequest,
    Generation,
    Group,
    JsonObject,
    Observation,
    Prompt,
    Sample,
    TrainShard,
)

if TYPE_CHECKING:  # processes without a model read this module too
    from torch import Tensor

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
    """``--custom-generate-function-path module:attr``: one trajectory of one prompt.

    >>> from miles_async.rollout.generate import build_sample, routing_key
    >>> from miles_async.trajectory.turn import take_turn
    >>> async def four_tokens(client, attempt, sample_index):
    ...     key = routing_key(attempt, sample_index)  # one per sample: its requests find their prefix in one engine
    ...     sampling = {"temperature": 1.0, "max_new_tokens": 4}
    ...     turn = await take_turn(client, attempt.prompt.token_ids, sampling, routing_key=key)
    ...     return build_sample(attempt.prompt, turn, decode=lambda token_ids: " ".join(map(str, token_ids)))
    >>> asyncio.run(four_tokens(client, attempt, 0)).text
    '7 8 9 2'
    """

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample: ...


@runtime_checkable
class Environment(Protocol):
    """What the model acts on. One object per episode, so there is nothing to reset; it is closed however the episode
    ends.

    >>> class GuessTheNumber:
    ...     def __init__(self, prompt):
    ...         self.number = int(prompt.label)
    ...
    ...     def tools(self):
    ...         return ()
    ...
    ...     async def step(self, turn):
    ...         if int(turn.text) == self.number:
    ...             return Observation(done=True, reward=1.0)
    ...         hint = "more" if int(turn.text) < self.number else "less"
    ...         return Observation(messages=({"role": "user", "content": hint},), reward=0.0)
    ...
    ...     async def close(self): ...
    >>> asyncio.run(GuessTheNumber(prompt).step(turn)).messages
    ({'role': 'user', 'content': 'less'},)
    """

    def tools(self) -> Sequence[JsonObject]:
        """Functions that the model may call, as chat completions describe them; () for none."""
        ...

    async def step(self, turn: AssistantTurn) -> Observation:
        """Answer the model's turn. Whatever it raises costs its attempt, not the run. With
        ServiceUnavailableError (or OSError, such as ConnectionError and TimeoutError) the episode begins again when the
        service is back.
        """
        ...

    async def close(self) -> None: ...


class MakeEnvironment(Protocol):
    """``--environment-path module:attr``: the class of an environment, or a function that makes one.

    >>> class Once:
    ...     def __init__(self, expected):
    ...         self.expected = expected
    ...
    ...     def tools(self):
    ...         return ()
    ...
    ...     async def step(self, turn):
    ...         return Observation(done=True, reward=float(turn.text == self.expected))
    ...
    ...     async def close(self): ...
    >>> def make_environment(prompt):
    ...     return Once(prompt.metadata.get("expected", prompt.label))
    >>> make_environment(prompt).expected
    '21'
    """

    def __call__(self, prompt: Prompt) -> Environment: ...


@runtime_checkable
class Agent(Protocol):
    """``--agent-path module:attr``: solves a prompt by chat completions at ``base_url``, with
    the key in OPENAI_API_KEY.

    Returns what the sample's metadata keep as ``agent_turns`` (a number, say), or that and a reward: (turns, reward).
    Without a reward, the run's reward decides.

    >>> import aiohttp, os
    >>> async def ask_once(base_url, prompt):
    ...     body = {"model": "policy", "messages": [{"role": "user", "content": prompt.text}]}
    ...     headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    ...     async with aiohttp.ClientSession(headers=headers) as session:
    ...         async with session.post(f"{base_url}/chat/completions", json=body) as response:
    ...             answer = await response.json()
    ...     return 1, float(answer["choices"][0]["message"]["content"] == prompt.label)
    >>> asyncio.run(ask_once(base_url, prompt))
    (1, 1.0)
    """

    async def __call__(self, base_url: str, prompt: Prompt) -> object: ...


@runtime_checkable
class Reward(Protocol):
    """``--custom-rm-path module:attr``: the reward of one sample.

    Raises RewardError (or anything) on failure, and ServiceUnavailableError (or OSError, such as ConnectionError and
    TimeoutError) if a service that it needs is down: it is asked again when that is back.

    >>> async def digits_right(prompt, sample):
    ...     if sample.finish_reason != "stop":
    ...         return 0.0
    ...     right = sum(said == expected for said, expected in zip(sample.text, prompt.label))
    ...     return right / len(prompt.label)
    >>> asyncio.run(digits_right(prompt, sample))
    0.5
    """

    async def __call__(self, prompt: Prompt, sample: Sample) -> float: ...


@runtime_checkable
class GroupFilter(Protocol):
    """``--group-filter-path module:attr``: why a rewarded group must not be trained on, or None to keep it.

    >>> def has_spread(group):
    ...     rewards = {sample.reward for sample in group.samples}
    ...     return None if len(rewards) > 1 else "all rewards are equal"
    >>> has_spread(group)
    'all rewards are equal'
    """

    def __call__(self, group: Group) -> str | None: ...


class AdvantageEstimator(Protocol):
    """``--advantage-estimator module:attr``: how much better each sample is than the others of its group.

    Runs on the rollout side. The attribute is a class (or a function), called with the AlgorithmArguments, that gives
    an estimator.

    >>> class MeanBaseline:
    ...     def __init__(self, arguments): ...
    ...
    ...     def __call__(self, groups):
    ...         rewards = [np.float32([sample.reward for sample in group.samples]) for group in groups]
    ...         return np.concatenate([of_group - of_group.mean() for of_group in rewards])
    """

    def __call__(self, groups: Sequence[Group]) -> Float32:
        """Return float32 advantages, finite: one per sample of all groups in order, or one per token of all branches of
        these samples. Tokens without loss may then have any.
        """
        ...


Need = Literal["old_logprobs", "ref_logprobs", "entropy", "values"]
"""An array of TokenBatch that costs a pass of a model, so that it is computed only if something needs it.

``values`` takes a critic, which no backend has yet: what needs them is refused at the start.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """One micro-batch on the trainer's device: S sequences of N tokens in all, one behind another.

    Entry i of an array [N] describes ``tokens[i]`` given its prefix. Arrays are only read, and have no gradient.
    Log-probs and entropies are 0 where no loss is carried: there they are not computed.
    """

    tokens: Tensor  # int64 [N]
    offsets: Tensor  # int64 [S + 1]: sequence s is [offsets[s], offsets[s + 1])
    loss_mask: Tensor  # float32 [N]: 1 where the token carries loss, else 0
    advantages: Tensor  # float32 [N], 0 where no loss is carried
    rewards: Tensor  # float32 [S], of the sequence's sample
    rollout_logprobs: Tensor  # float32 [N], by the engine that sampled the token
    weight_versions: Tensor  # int64 [N], NO_VERSION where no engine generated the token
    oldest_versions: Tensor  # int64 [N]: the oldest version in the token's sequence
    target_version: int  # the version that the optimizer steps from
    computed: Mapping[Need, Tensor]  # each [N]; read them by the properties below

    @property
    def ages(self) -> Tensor:
        """int64 [N], in versions: from the one that sampled the token to the one that the optimizer steps from.
        Meaningless at tokens that no engine generated.
        """
        return self.target_version - self.weight_versions

    @property
    def old_logprobs(self) -> Tensor:
        """float32 [N], by the policy that ratios compare with: the trainer's before its first optimizer step on the
        batch, the engine's that sampled the token with ``--use-rollout-logprobs``, or something between both with
        ``--prox-logp-method loglinear``.
        """
        return self._needed("old_logprobs")

    @property
    def ref_logprobs(self) -> Tensor:
        """float32 [N], by the reference model (``--ref-hf-checkpoint``)."""
        return self._needed("ref_logprobs")

    @property
    def entropy(self) -> Tensor:
        """float32 [N], of the distribution that the token is drawn from now; without gradient."""
        return self._needed("entropy")

    @property
    def values(self) -> Tensor:
        """float32 [N], by the critic."""
        return self._needed("values")

    def with_computed(self, name: Need, values: Tensor) -> TokenBatch:
        """The same batch that has ``name`` too."""
        return replace(self, computed={**self.computed, name: values})

    def _needed(self, name: Need) -> Tensor:
        if name not in self.computed:
            raise ContractViolation(
                f"a loss, correction or --token-advantages reads {name}, which is computed only on request: expected "
                f"{name!r} in its `needs`"
            )
        return self.computed[name]


class TokenAdvantages(Protocol):
    """``--token-advantages module:attr``: turns the advantage of a sample into one per token.

    Runs on the trainer, after the passes for what it needs and before the first optimizer step on the batch. The
    attribute is a class (or a function), called with the AlgorithmArguments, that gives one of these.

    >>> class Discounted:  # tokens far from the end of their sequence count less
    ...     needs = ()
    ...
    ...     def __init__(self, arguments): ...
    ...
    ...     def __call__(self, batch):
    ...         lengths = batch.offsets.diff()
    ...         last = torch.repeat_interleave(batch.offsets[1:] - 1, lengths)
    ...         return batch.advantages * 0.999 ** (last - torch.arange(len(batch.tokens)))
    """

    @property
    def needs(self) -> Collection[Need]: ...

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return float32 [N]; tokens without loss may have any.

        ``batch.advantages``: what ``--advantage-estimator`` gave each sample, at all its tokens that carry loss.
        """
        ...


class PolicyLoss(Protocol):
    """``--policy-loss module:attr``: the loss of each token.

    The attribute is a class (or a function), called with the AlgorithmArguments, that gives a loss. All that
    ``my_losses.py`` holds for ``--policy-loss my_losses:Tapered`` (after TOPR, arXiv:2503.14286):

    >>> class Tapered:  # good tokens are learned whole, bad ones only as far as they are likely
    ...     needs = ("old_logprobs",)
    ...
    ...     def __init__(self, arguments):
    ...         pass  # an AlgorithmArguments: its flags, if a loss has use for them
    ...
    ...     def __call__(self, logprobs, batch):
    ...         ratio = (logprobs - batch.old_logprobs).detach().exp()
    ...         weight = ratio.clamp(max=1.0).where(batch.advantages < 0, 1.0)
    ...         return -weight * batch.advantages * logprobs, {"ratio_mean": ratio}
    """

    @property
    def needs(self) -> Collection[Need]: ...

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each token and metrics by name, each [N]; finite, but at tokens without loss ignored.

        ``logprobs``: float32 [N] by the policy that is trained, with gradient; 0 where no loss is carried.
        Metrics are logged as train/NAME: the mean over loss tokens, or the largest if NAME ends in ``_max``.
        """
        ...


class Correction(Protocol):
    """``--tis-mode module:attr``, with ``--use-tis``: the weight of each token in the policy loss.

    It corrects for tokens having been sampled by other weights. The attribute is a class (or a function), called with
    the AlgorithmArguments, that gives a correction.

    >>> class Masked:  # tokens whose importance weight is above the bound count for nothing
    ...     needs = ("old_logprobs",)
    ...
    ...     def __init__(self, arguments):
    ...         self.largest = arguments.tis_clip
    ...
    ...     def __call__(self, logprobs, batch):
    ...         weight = (batch.old_logprobs - batch.rollout_logprobs).exp()
    ...         return torch.where(weight > self.largest, 0.0, weight), {"masked": (weight > self.largest).float()}
    """

    @property
    def needs(self) -> Collection[Need]: ...

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return weights and metrics by name, each [N] as in PolicyLoss. ``logprobs``: as there, without gradient."""
        ...


class KlEstimator(Protocol):
    """``--kl-loss-type module:attr``, with ``--use-kl-loss``: an estimate of KL(π ‖ π_ref) at each token.

    >>> def squared(logprobs, reference):
    ...     return (logprobs - reference) ** 2 / 2
    """

    def __call__(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        """Return [N] from log-probs [N] of the sampled tokens; differentiable in ``logprobs``."""
        ...


class Aggregation(Protocol):
    """``--loss-aggregation module:attr``: what the loss of an optimizer step is the mean over (tokens, sequences, ...).

    >>> def mean_over_tokens(loss, batch):
    ...     return (loss * batch.loss_mask).sum(), batch.loss_mask.count_nonzero()
    """

    def __call__(self, loss: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the sum that ``loss`` [N] gives in this micro-batch, and an integer tensor: how many it is over.

        An optimizer step divides sum by number, both added up over all its micro-batches and ranks.
        """
        ...


class TrainBackend(Protocol):
    """One rank of a training engine, by ``--train-backend``: a name in the entry points ``miles_async.backends``.

    >>> import torch
    >>> class OneWeight:
    ...     data_parallel_rank = pipeline_stage = 0
    ...
    ...     def __init__(self, *, rank, world_size, local_rank, store, **settings):
    ...         self.weight = torch.zeros(1)
    ...
    ...     def train(self, shard):
    ...         for micro_batches in shard.optimizer_steps:
    ...             self.weight += sum(float(batch.rewards.mean()) for batch in micro_batches)
    ...         return {"weight": float(self.weight)}
    ...
    ...     def logprobs(self, sequences, temperature=None):
    ...         return [[0.0] * (len(tokens) - 1) for tokens in sequences]
    ...
    ...     def export_weights(self):
    ...         yield "weight", self.weight
    ...
    ...     def save(self, directory):
    ...         torch.save(self.weight, directory / "weight.pt")
    ...
    ...     def load(self, directory):
    ...         self.weight = torch.load(directory / "weight.pt")
    ...
    ...     save_hf = save
    >>> backend = OneWeight(rank=0, world_size=1, local_rank=0, store=None)
    >>> backend.train(shard)
    {'weight': 0.5}
    >>> backend.save(directory)
    >>> backend.load(directory)
    >>> dict(backend.export_weights())
    {'weight': tensor([0.5000])}
    """

    data_parallel_rank: int
    pipeline_stage: int | None  # on the first rank of a pipeline stage, which may send weights; None on others

    def train(self, shard: TrainShard) -> dict[str, float]: ...

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float | None = None) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, at the rollout temperature unless given. Collective."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        """(HF name, torch tensor) in a fixed order, on every rank. Collective.

        A tensor on a CPU may be overwritten when the next one is asked for. Those on a GPU are copied beside the
        export, so it writes none of them again.
        """
        ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None:
        """Restore what :meth:`save` wrote, in this layout of ranks or another. Settings of the optimizer are flags',
        whatever they were. Raises CheckpointError.
        """
        ...

    def save_hf(self, directory: Path) -> None: ...


@runtime_checkable
class SavesInBackground(Protocol):
    r"""A training backend whose checkpoints are written while it trains on (``--async-save``).

    >>> class OneCopy:
    ...     weight = torch.tensor([0.5])
    ...
    ...     def stage_save(self, directory):
    ...         self.staged = directory, self.weight.clone()
    ...
    ...     def write_save(self):
    ...         directory, copy = self.staged
    ...         torch.save(copy, directory / "rank-0.pt")
    ...         return b"rank-0.pt"
    ...
    ...     def finish_save(self, parts):
    ...         (self.staged[0] / "index").write_bytes(b"\n".join(parts))
    >>> backend = OneCopy()
    >>> backend.stage_save(directory)
    >>> _ = backend.weight.add_(1.0)  # training goes on
    >>> backend.finish_save([backend.write_save()])
    >>> torch.load(directory / "rank-0.pt")
    tensor([0.5000])
    """

    def stage_save(self, directory: Path) -> None:
        """Copy all that ``save(directory)`` would write. Collective. Nothing is copied before the last one is whole."""
        ...

    def write_save(self) -> bytes:
        """Write this rank's files from the copy, in a thread of its own while training goes on: nothing collective.
        Return what :meth:`finish_save` needs to know of them. Raises CheckpointError.
        """
        ...

    def finish_save(self, parts: Sequence[bytes]) -> None:
        """On rank 0, in the same thread, once all ranks have written: make the checkpoint loadable. ``parts``: what
        each rank returned, in rank order. Raises CheckpointError.
        """
        ...


@runtime_checkable
class LeavesDevice(Protocol):
    """A training backend that engines may share GPUs with (``--colocate``).

    >>> class OneTensor:
    ...     weight = torch.tensor([0.5])
    ...
    ...     def offload(self):
    ...         self.kept = self.weight.cpu().clone()
    ...         self.weight.untyped_storage().resize_(0)  # views of it stay what they are
    ...
    ...     def onload(self):
    ...         self.weight.untyped_storage().resize_(self.kept.nbytes)
    ...         self.weight.copy_(self.kept)
    >>> backend = OneTensor()
    >>> backend.offload()
    >>> backend.weight.untyped_storage().nbytes()
    0
    >>> backend.onload()
    >>> backend.weight
    tensor([0.5000])
    """

    def offload(self) -> None:
        """Free the device's memory until :meth:`onload`, keeping its contents. Nothing is called meanwhile, except to
        write a staged checkpoint.
        """
        ...

    def onload(self) -> None:
        """Undo :meth:`offload`."""
        ...


class Tracker(Protocol):
    """``--custom-tracker-path module:attr``: a class made without arguments that is given all metrics.

    It is called in a thread of its own, one step after another; what it raises is logged and costs the run nothing.

    >>> class PrintRewards:
    ...     def log(self, metrics, *, step):
    ...         if "reward/mean" in metrics:
    ...             print(f"step {step}: reward {metrics['reward/mean']:.2f}")
    ...
    ...     def finish(self):
    ...         print("done")
    >>> tracker = PrintRewards()
    >>> tracker.log({"reward/mean": 0.5, "lr": 1e-6}, step=3)
    step 3: reward 0.50
    >>> tracker.finish()
    done
    """

    def log(self, metrics: Metrics, *, step: int) -> None: ...

    def finish(self) -> None: ...
