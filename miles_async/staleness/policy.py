"""The staleness predicate (C1), and the two knobs for age and lead (C4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.staleness import BatchOrder, StaleGroupAction, StalenessArguments
from miles_async.errors import ConfigurationError, ContractViolation, VersionUnknownError


def age(oldest_version: int, target_version: int) -> int:
    """Return the age: versions between the weights of the oldest loss token and those the optimizer steps from.

    Raises:
        VersionUnknownError: a version is negative: unknown is an error, never "fresh".
        ContractViolation: sampled by weights newer than those the optimizer steps from: no such weights exist
            at the cut, so versions are being mislabelled.
    """
    if oldest_version < 0 or target_version < 0:
        raise VersionUnknownError(
            f"expected versions from 0 up, found oldest {oldest_version} and target {target_version}"
        )
    if oldest_version > target_version:
        raise ContractViolation(
            f"sampled by version {oldest_version}, but the optimizer steps from version {target_version}"
        )
    return target_version - oldest_version


def is_stale(oldest_version: int, target_version: int, bound: int | None) -> bool:
    """Return whether a sample is too old to be trained: the one predicate of C1.

    It is asked by ``StalenessBuffer.cut``, against the version the optimizer will step from. An age
    equal to the bound is fresh. Without a bound nothing is stale, but versions must be known all the same.

    >>> is_stale(3, 5, 2), is_stale(2, 5, 2), is_stale(2, 5, None)
    (False, True, False)
    """
    versions_old = age(oldest_version, target_version)
    return bound is not None and versions_old > bound


def is_tighter(bound: int | None, than: int | None) -> bool:
    """Return whether ``bound`` rejects ages that ``than`` accepts. None: not bounded.

    >>> is_tighter(1, 2), is_tighter(2, None), is_tighter(2, 2), is_tighter(None, 2)
    (True, True, False, False)
    """
    return bound is not None and (than is None or bound < than)


def check_ages(oldest_versions: Iterable[int], target_version: int, bound: int | None) -> None:
    """Check C1 at run time, on per-sample versions recomputed from the tokens about to be trained.

    Raises:
        ContractViolation: a sample is older than the bound; names all such samples.
    """
    too_old = {
        index: age(version, target_version)
        for index, version in enumerate(oldest_versions)
        if is_stale(version, target_version, bound)
    }
    if too_old:
        raise ContractViolation(
            f"expected ages up to --max-weight-staleness {bound} in a batch cut for version "
            f"{target_version}, found (sample: age) {too_old}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessPolicy:
    """The knobs of a run, with defaults resolved."""

    bound: int | None  # K: oldest age that is trained; None: not bounded
    lead_batches: int  # batches admitted and not yet trained, at most
    batch_size: int  # groups per rollout step
    action: StaleGroupAction  # for groups that are too old at the cut (C5)
    order: BatchOrder = "oldest_first"  # which groups a batch takes first
    min_samples: int | None = None  # fewest samples that a group is trained with (C7); None: all of them

    def __post_init__(self) -> None:
        """Refuse settings that could never cut a batch (C3)."""
        if self.bound is not None and self.bound < 0:
            raise ConfigurationError(f"expected --max-weight-staleness of at least 0 or none, found {self.bound}")
        if self.lead_batches < 1:
            raise ConfigurationError(
                f"expected --max-rollout-lead of at least 1, found {self.lead_batches}: no batch would fill"
            )
        if self.batch_size < 1:
            raise ConfigurationError(f"expected --rollout-batch-size of at least 1, found {self.batch_size}")
        if self.action not in (actions := get_args(StaleGroupAction)):
            raise ConfigurationError(f"expected --stale-group-action {' or '.join(actions)}, found {self.action!r}")
        if self.order not in (orders := get_args(BatchOrder)):
            raise ConfigurationError(f"expected --batch-order {' or '.join(orders)}, found {self.order!r}")

    @classmethod
    def from_arguments(cls, arguments: StalenessArguments, rollout: RolloutArguments) -> StalenessPolicy:
        """The knobs in force: ``--on-policy`` and defaults resolved."""
        return cls(
            bound=arguments.bound,
            lead_batches=arguments.lead,
            batch_size=rollout.rollout_batch_size,
            action=arguments.stale_group_action,
            order=arguments.batch_order,
            min_samples=arguments.min_samples(rollout.n_samples_per_prompt),
        )

    @property
    def capacity(self) -> int:
        """Groups that may be admitted and not yet trained; beyond K + 1 batches they would be swept (C4)."""
        batches = self.lead_batches if self.bound is None else min(self.lead_batches, self.bound + 1)
        return batches * self.batch_size
