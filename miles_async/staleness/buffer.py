"""The buffer of finished groups, and the cut: the only place where freshness is judged (C1)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from statistics import pvariance

from miles_async.api import GroupFilter
from miles_async.arguments.staleness import BatchOrder
from miles_async.errors import ContractViolation, VersionUnknownError
from miles_async.staleness.events import Trimmed
from miles_async.staleness.policy import is_stale
from miles_async.staleness.versions import group_of, oldest_version
from miles_async.types import Group


class StalenessBuffer:
    """Finished groups, in the order of ``--batch-order``.

    The sweep touches stale groups only (they are kept by version too), and the order is a heap, so a group
    costs O(log n) over its whole stay, however many wait (``tests/benchmarks/buffer_cost.py``).
    """

    def __init__(
        self,
        batch_size: int,
        bound: int | None,
        *,
        order: BatchOrder = "oldest_first",
        min_samples: int | None = None,
        group_filter: GroupFilter | None = None,
    ) -> None:
        """``order``: which groups a batch takes first. Those with the same place go in order of admission, and a group
        that loses samples keeps its place. ``min_samples``: a group keeps its fresh samples while that many remain
        (C7) and ``group_filter``, which must not raise, has no reason against them; None: one stale sample makes its
        group stale.
        """
        self._batch_size = batch_size
        self._bound = bound
        self._batch_order = order
        self._completions = itertools.count()
        self._min_samples = min_samples
        self._group_filter = group_filter
        self._groups: dict[int, Group] = {}  # by attempt_id
        # Heap of (place in the order, attempt id); those no longer in _groups are skipped.
        self._order: list[tuple[float, int]] = []
        self._by_version: dict[int, set[int]] = {}  # oldest version → attempt ids
        self._versions: list[int] = []  # heap of the keys of _by_version, and of versions that are used up

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """The waiting groups, oldest admission first."""
        return (self._groups[attempt_id] for attempt_id in sorted(self._groups))

    def put(self, group: Group) -> None:
        """Add a finished group.

        Raises:
            ContractViolation: it is empty (C7), or its attempt is here already.
            VersionUnknownError: its oldest version is unknown.
        """
        attempt_id, version = group.attempt.attempt_id, group.oldest_version
        if not group.samples:
            raise ContractViolation(f"the group of attempt {attempt_id} is empty")
        if attempt_id in self._groups:
            raise ContractViolation(f"attempt {attempt_id} is in the buffer already")
        if version < 0:
            raise VersionUnknownError(f"attempt {attempt_id}: expected a version from 0 up, found {version}")
        self._groups[attempt_id] = group
        heapq.heappush(self._order, (self._place(group), attempt_id))
        self._note_version(attempt_id, version)

    def rebound(self, bound: int | None) -> None:
        """Set the bound of later cuts."""
        self._bound = bound

    def count_stale(self, target_version: int) -> int:
        """Groups in which a cut for this version would find a stale sample."""
        stale = (ids for version, ids in self._by_version.items() if is_stale(version, target_version, self._bound))
        return sum(map(len, stale))

    def cut(self, target_version: int) -> tuple[tuple[Group, ...], tuple[Group, ...], tuple[Trimmed, ...]]:
        """Take one batch for the version the optimizer will step from, after sweeping stale groups.

        Return the batch in its order, () if too few groups were fresh; the stale groups that were swept, oldest
        admission first; and the groups that lost stale samples and stay, or are in the batch (C7).

        Not the version when rollouts were collected: a batch prepared while another one trains is cut for the
        version that will be current then. With too few fresh groups only the sweep happens, so that stale
        prompts are replaced at once (C3): cut again when the next group is put.
        """
        stale, trimmed = self._sweep(target_version)
        enough = len(self._groups) >= self._batch_size
        groups = tuple(self._pop_first() for _ in range(self._batch_size)) if enough else ()
        return groups, stale, trimmed

    def _sweep(self, target_version: int) -> tuple[tuple[Group, ...], tuple[Trimmed, ...]]:
        swept: list[int] = []
        while self._versions and is_stale(self._versions[0], target_version, self._bound):
            swept.extend(self._by_version.pop(heapq.heappop(self._versions), ()))
        stale, trimmed = [], []
        for attempt_id in sorted(swept):
            group = self._groups[attempt_id]
            if rest := self._fresh_rest(group, target_version):
                self._groups[attempt_id] = rest  # and keeps its place
                self._note_version(attempt_id, rest.oldest_version)
                trimmed.append(Trimmed(rest, len(group.samples) - len(rest.samples)))
            else:
                stale.append(self._groups.pop(attempt_id))
        if len(self._order) > 2 * len(self._groups) + self._batch_size:  # amortized over the ids it drops
            self._order = [entry for entry in self._order if entry[1] in self._groups]
            heapq.heapify(self._order)
        return tuple(stale), tuple(trimmed)

    def _fresh_rest(self, group: Group, target_version: int) -> Group | None:
        if self._min_samples is None or len(group.samples) <= self._min_samples:
            return None
        fresh = [
            sample for sample in group.samples if not is_stale(oldest_version(sample), target_version, self._bound)
        ]
        if not fresh or len(fresh) < self._min_samples:
            return None
        rest = group_of(group.attempt, fresh, stopped=group.stopped, aborted=group.aborted)
        return rest if self._group_filter is None or self._group_filter(rest) is None else None

    def _place(self, group: Group) -> float:
        match self._batch_order:
            case "oldest_first":
                return group.attempt.attempt_id
            case "completion":
                return next(self._completions)
            case "reward_variance":
                return -reward_variance(group)

    def _note_version(self, attempt_id: int, version: int) -> None:
        if version not in self._by_version:
            self._by_version[version] = set()
            heapq.heappush(self._versions, version)
        self._by_version[version].add(attempt_id)

    def _pop_first(self) -> Group:
        while (attempt_id := heapq.heappop(self._order)[1]) not in self._groups:
            pass
        group = self._groups.pop(attempt_id)
        same_version = self._by_version[group.oldest_version]
        same_version.remove(attempt_id)
        if not same_version:
            del self._by_version[group.oldest_version]
        return group


def reward_variance(group: Group) -> float:
    """Return the variance of the rewards of a group's samples: 0 where all are right or all are wrong.

    A group whose samples differ most teaches most, as in VCRL (2509.19803), which scores prompts by this variance and
    leaves out those below a threshold; taking the highest of the buffer first is ours. D-ARL (ICML 2026) also chooses
    from a buffer by a variance, but, by its abstract, by how well samples fit the current policy, which needs the
    policy's log-probs of all buffered tokens.
    """
    return pvariance([sample.reward or 0.0 for sample in group.samples])
