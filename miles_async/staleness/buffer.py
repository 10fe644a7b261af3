"""Where finished groups wait, and the cut: the only place where freshness is judged (C1)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from miles_async.errors import ContractViolation, VersionUnknownError
from miles_async.staleness.policy import is_stale
from miles_async.types import Group


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What left the buffer at one cut."""

    target_version: int  # the optimizer will step from it
    groups: tuple[Group, ...]  # batch_size groups, oldest admission first; () if too few were fresh
    stale: tuple[Group, ...]  # swept: too old for target_version; oldest admission first


class StalenessBuffer:
    """Finished groups in order of admission.

    The sweep touches stale groups only (they are kept by version too), and the order is a heap, so a group
    costs O(log n) over its whole stay, however many wait (``tests/benchmarks/buffer_cost.py``).
    """

    def __init__(self, batch_size: int, bound: int | None) -> None:
        self._batch_size = batch_size
        self._bound = bound
        self._groups: dict[int, Group] = {}  # by attempt_id
        self._order: list[int] = []  # heap of attempt ids; those no longer in _groups are skipped
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
            raise ContractViolation(f"C7: the group of attempt {attempt_id} is empty")
        if attempt_id in self._groups:
            raise ContractViolation(f"C2: attempt {attempt_id} is in the buffer already")
        if version < 0:
            raise VersionUnknownError(f"attempt {attempt_id}: expected a version from 0 up, found {version}")
        self._groups[attempt_id] = group
        heapq.heappush(self._order, attempt_id)
        if version not in self._by_version:
            self._by_version[version] = set()
            heapq.heappush(self._versions, version)
        self._by_version[version].add(attempt_id)

    def cut(self, target_version: int) -> Cut:
        """Take one batch for the version the optimizer will step from, after sweeping what is too old for it.

        Not the version when rollouts were collected: a batch prepared while another one trains is cut for the
        version that will be current then. With too few fresh groups only the sweep happens, so that stale
        prompts are replaced at once (C3): cut again when the next group is put.
        """
        stale = self._sweep(target_version)
        enough = len(self._groups) >= self._batch_size
        groups = tuple(self._pop_oldest() for _ in range(self._batch_size)) if enough else ()
        return Cut(target_version=target_version, groups=groups, stale=stale)

    def _sweep(self, target_version: int) -> tuple[Group, ...]:
        swept: list[int] = []
        while self._versions and is_stale(self._versions[0], target_version, self._bound):
            swept.extend(self._by_version.pop(heapq.heappop(self._versions), ()))
        stale = tuple(self._groups.pop(attempt_id) for attempt_id in sorted(swept))
        if len(self._order) > 2 * len(self._groups) + self._batch_size:
            self._order = sorted(self._groups)  # a sorted list is a heap; amortized over the ids it drops
        return stale

    def _pop_oldest(self) -> Group:
        while (attempt_id := heapq.heappop(self._order)) not in self._groups:
            pass
        group = self._groups.pop(attempt_id)
        same_version = self._by_version[group.oldest_version]
        same_version.remove(attempt_id)
        if not same_version:
            del self._by_version[group.oldest_version]
        return group
