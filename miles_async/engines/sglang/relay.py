"""In the server's process: brings buckets to every node once, on a CPU.

The sender sends each bucket to rank 1 alone. From there it goes from node to node in a chain: the first rank of each
node receives it from the previous node's, passes it on, and shares the memory with the other ranks of its node,
which load it from there. So every network link carries the weights once, the sender's too, however many engines there
are, and a node receives and stores them once::

    sender ──> node A: rank 1 ──────> node B: rank 3 ──────> ...
                       rank 2 reads           rank 4 reads
                       rank 1's memory        rank 3's memory

A rank that may not open its neighbour's memory receives by itself, like a separate node. The memory is an
anonymous file, which the kernel removes with the last process that has it.

Ranks keep their places and their memory as long as the process groups: getting memory from the system, page by page,
may cost a CPU more than all the rest.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

FIRST = 1  # the rank that the sender sends to

# Tags of messages between two ranks; messages with one tag arrive in order.
BUCKET = 0
_READY = 1  # a bucket is in the shared memory
_DONE = 2  # and was loaded from there
_FOUND = 3  # which ranks share a node

_NAMESPACE = Path("/proc/self/ns/pid")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Relay:
    """Implements Line: this rank's place in the chain, and memory that publications of a process group share."""

    def __init__(self, group: dist.ProcessGroup, at_once: int, largest: int) -> None:
        """Find out, with all ranks of ``group`` but the sender's, which of them share a node.

        ``at_once``: buckets that are received or loaded at the same time. ``largest``: bytes of the largest one.
        """
        self._size = at_once, largest
        slots = at_once + 1  # one more, so that this rank need not wait for its readers
        slot_bytes = max(1, -(-largest // mmap.PAGESIZE)) * mmap.PAGESIZE
        own = os.memfd_create("weights")  # takes no memory until somebody writes to it
        try:
            os.ftruncate(own, slots * slot_bytes)
            self._route, memory = _find_route(group, own)
        finally:
            os.close(own)
        if memory is not None:
            parts = torch.frombuffer(memory, dtype=torch.uint8).split(slot_bytes)
        else:
            needed = at_once if self._route.next is None else slots
            parts = tuple(torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(needed))
        self._slots = [_Slot(part) for part in parts]
        self._started = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup, at_once: int, largest: int) -> Relay:
        """The relay of the group's last publication if this one has buckets alike, else a new one.

        Every rank decides the same, since all know of the same buckets.
        """
        if (kept := _relays.get(group)) is None or kept._size != (at_once, largest):
            _relays.pop(group, None)  # its memory is free before more is taken
            del kept
            kept = _relays[group] = cls(group, at_once, largest)
        return kept

    def start(self, group: dist.ProcessGroup, size: int) -> _Arriving:
        slot = self._slots[self._started % len(self._slots)]
        self._started += 1
        slot.clear()
        return _Arriving(group, self._route, slot, size)

    def finish(self) -> None:
        for slot in self._slots:
            slot.clear()
        self._started = 0  # the next publication touches no more memory than this one


_relays: WeakKeyDictionary[dist.ProcessGroup, Relay] = WeakKeyDictionary()  # a relay ends with its group


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's place."""

    source: int  # rank that it gets buckets from
    shared: bool = False  # from whose memory it reads them
    next: int | None = None  # first rank of the next node
    readers: tuple[int, ...] = ()  # ranks that read this one's memory


class _Slot:
    """Memory for one bucket."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.in_use: list[dist.Work] = []  # what has to end before another bucket comes here

    def clear(self) -> None:
        """Wait until no rank needs the contents."""
        _wait(self.in_use)
        self.in_use.clear()


class _Arriving:
    """Implements Arriving."""

    def __init__(self, group: dist.ProcessGroup, route: Route, slot: _Slot, size: int) -> None:
        self._group = group
        self._route = route
        self._slot = slot
        self._data = slot.memory[:size]
        into, tag = (_signal(), _READY) if route.shared else (self._data, BUCKET)
        self._received = group.recv([into], route.source, tag)

    def wait(self) -> Tensor:
        """Wait for the bucket, and pass it on."""
        self._received.wait()
        if self._route.next is not None:
            self._slot.in_use.append(self._group.send([self._data], self._route.next, BUCKET))
        for rank in self._route.readers:
            self._slot.in_use.append(self._group.send([_signal()], rank, _READY))
            self._slot.in_use.append(self._group.recv([_signal()], rank, _DONE))
        return self._data

    def loaded(self) -> None:
        if self._route.shared:
            self._slot.in_use.append(self._group.send([_signal()], self._route.source, _DONE))


# ------------------------------------------------------------------------------------------------- the routes
def _find_route(group: dist.ProcessGroup, own: int) -> tuple[Route, mmap.mmap | None]:
    """This rank's place, and the memory that its node shares: ``own``, or the file of the node's first rank. None if
    nothing is shared.
    """
    rank = group.rank()
    offers = _share(group, [_node(), os.getpid(), own])
    first = FIRST + [node for node, *_ in offers].index(_node())
    _, process, file = offers[first - FIRST]
    memory = None if first == rank else _map(f"/proc/{process}/fd/{file}")
    firsts = [answer for (answer,) in _share(group, [rank if memory is None else first])]
    route = find_routes(firsts)[rank]
    return route, mmap.mmap(own, 0) if route.readers else memory


def find_routes(firsts: Sequence[int]) -> dict[int, Route]:
    """The place of every rank. ``firsts``: for each of them, from 1 on, the one whose memory it reads, or itself."""
    chain = [rank for rank, first in enumerate(firsts, start=FIRST) if rank == first]
    result = {}
    for before, rank, after in zip([0, *chain], chain, [*chain[1:], None], strict=False):
        readers = tuple(other for other, first in enumerate(firsts, start=FIRST) if first == rank != other)
        result[rank] = Route(before, next=after, readers=readers)
        result |= dict.fromkeys(readers, Route(rank, shared=True))
    return result


def _share(group: dist.ProcessGroup, mine: list[int]) -> list[list[int]]:
    """All-gather ``mine`` over all ranks but the sender's, through rank 1."""
    row, others = torch.tensor(mine), range(FIRST + 1, group.size())
    table = row.new_empty(group.size() - FIRST, len(mine))
    if group.rank() == FIRST:
        table[0] = row
        _wait([group.recv([table[rank - FIRST]], rank, _FOUND) for rank in others])
        _wait([group.send([table], rank, _FOUND) for rank in others])
    else:
        _wait([group.send([row], FIRST, _FOUND), group.recv([table], FIRST, _FOUND)])
    return table.tolist()


def _node() -> int:
    """The same number for processes that can open each other's files."""
    found = f"{_BOOT_ID.read_text()} {_NAMESPACE.readlink()} {os.getuid()}"
    return int.from_bytes(blake2b(found.encode(), digest_size=7).digest(), "little")


def _map(path: str) -> mmap.mmap | None:
    """Map a file as a whole; None if this process may not open it."""
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except OSError:
        return None


def _signal() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _wait(operations: Iterable[dist.Work]) -> None:
    for operation in operations:
        operation.wait()
