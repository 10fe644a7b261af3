"""Protocols of algorithms: advantages, losses, corrections, estimates of the KL, means."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from miles_async.errors import ContractViolation
from miles_async.types import Float32, Group

if TYPE_CHECKING:  # processes without a model read this module too
    from torch import Tensor


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


Need = Literal["old_logprobs", "ref_logprobs", "teacher_logprobs", "trainer_logprobs", "entropy", "values", "surveyed"]
"""An array of TokenBatch that costs a pass of a model, so that it is computed only if something needs it.

``teacher_logprobs`` come with the samples, from the teacher of ``--use-opd``; ``surveyed`` is for losses that look at
the whole rollout batch first, such as ``clip_cov`` and ``sat``. ``values`` take a critic: if anything needs them, the
trainer has one and trains it. What needs an array that the run does not have is refused at the start.
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
    per_token: bool  # ``--advantage-estimator`` gave one advantage per token, not per sample
    rewards: Tensor  # float32 [S], of the sequence's sample
    group_ids: Tensor  # int64 [S], of the sample's group in the rollout batch; negative if the sequence is a filler
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
        batch, the engine's that sampled the token with ``--use-rollout-logprobs``, something between both with
        ``--prox-logp-method loglinear``, or the trainer's as it was when it sampled the token, with ``snapshots``.
        """
        return self._needed("old_logprobs")

    @property
    def trainer_logprobs(self) -> Tensor:
        """float32 [N], by the trainer before its first optimizer step on the batch, whatever ``old_logprobs`` are."""
        return self._needed("trainer_logprobs")

    @property
    def ref_logprobs(self) -> Tensor:
        """float32 [N], by the reference model (``--ref-hf-checkpoint``)."""
        return self._needed("ref_logprobs")

    @property
    def teacher_logprobs(self) -> Tensor:
        """float32 [N], by the teacher of ``--use-opd``, at temperature 1."""
        return self._needed("teacher_logprobs")

    @property
    def entropy(self) -> Tensor:
        """float32 [N], of the distribution that the token is drawn from now; without gradient."""
        return self._needed("entropy")

    @property
    def values(self) -> Tensor:
        """float32 [N], by the critic before its first optimizer step on the batch: the reward that it expects after the
        token's prefix.
        """
        return self._needed("values")

    @property
    def surveyed(self) -> Tensor:
        """float32 [N]: the policy loss's survey of the whole rollout batch."""
        return self._needed("surveyed")

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
    """``--loss-aggregation module:attr``: the unit over which an optimizer step's loss is a mean (tokens, sequences,
    ...).

    >>> def mean_over_tokens(loss, batch):
    ...     return (loss * batch.loss_mask).sum(), batch.loss_mask.count_nonzero()
    """

    def __call__(self, loss: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the sum that ``loss`` [N] gives in this micro-batch, and an integer tensor: how many it is over.

        An optimizer step divides sum by number, both added up over all its micro-batches and ranks.
        """
        ...
