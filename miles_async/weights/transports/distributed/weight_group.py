"""The sending end of one process group: rank 0; the others are engines (SGLang's ``init_custom_process_group``).

It is separate from the trainer's process groups: own store, name, deadlines and handling of errors
(``runtime/network/process_group_errors.py``). A member that dies, hangs or stays away breaks this process group and
nothing else: the operation that it breaks raises GroupBrokenError, at the latest at its deadline, and the communicator
is aborted.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from miles_async.runtime.network.process_group_errors import errors_are_raised
from miles_async.runtime.network.rendezvous import open_store
from miles_async.types import GroupBackend
from miles_async.weights.transports.own_stream import OwnStream

Result = TypeVar("Result")

JOIN_SECONDS = 30.0  # an engine that is up joins in less than a second
_GRACE_SECONDS = 1.0  # for an operation to notice its own deadline
# Where and how engines that get buckets one from another expect them (EngineFleet.receive_stream):
_FIRST_RECEIVER = 1
_BUCKET_TAG = 0


class GroupBrokenError(RuntimeError):
    """An operation failed or took too long; the process group cannot be used any more."""


class WeightGroup:
    """One process group with some engines. Not thread-safe: operations are called one after another."""

    def __init__(
        self,
        name: str,
        world_size: int,
        *,
        address: str,
        ports: range | None = None,
        backend: GroupBackend,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        """Listen at ``address``, on one of ``ports``, which stays bound: no other process takes it before engines join.

        ``timeout_seconds``: for one broadcast, and at most for joining.
        """
        self.name = name
        self._world_size = world_size
        self._backend = backend
        self._device = device
        self._stream = OwnStream(device)
        self._timeout = timeout_seconds
        self._join_timeout = min(timeout_seconds, JOIN_SECONDS)
        seconds = datetime.timedelta(seconds=self._join_timeout)
        self._store: dist.TCPStore | None = open_store(address, ports, world_size, seconds)
        self.port = self._store.port
        self._process_group: dist.ProcessGroup | None = None

    def join(self) -> None:
        """Wait for all members. Raises GroupBrokenError if they don't join in time."""
        self._process_group = self._finish(self._start(self._new_process_group), self._join_timeout)

    @contextmanager
    def sending(self, data: torch.Tensor, *, relayed: bool = False) -> Iterator[None]:
        """Send ``data`` while the block runs; leave when, as far as the backend knows, all has been received.

        ``relayed``: to the first of the engines' ranks, from which the others get it. Raises GroupBrokenError.
        """
        process_group = self._process_group
        if process_group is None:
            raise GroupBrokenError("it was never complete, or is broken")

        def send() -> None:
            with self._stream.used():
                if relayed:
                    process_group.send([data], _FIRST_RECEIVER, _BUCKET_TAG).wait()
                else:
                    dist.broadcast(data, src=0, group=process_group)

        sending = self._start(send)
        try:
            yield
        finally:
            self._finish(sending, self._timeout)

    def leave(self) -> None:
        """End this side; members that wait for it get an error. Idempotent."""
        process_group, self._process_group, self._store = self._process_group, None, None
        if process_group is not None:
            dist.destroy_process_group(process_group)

    def _start(self, call: Callable[[], Result]) -> Future[tuple[Result | None, str | None]]:
        """Run ``call`` in a new thread. The future gets its result, or the problem of the process group."""
        outcome: Future[tuple[Result | None, str | None]] = Future()  # no exception: a traceback keeps objects alive

        def run() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # the current device is per thread
                outcome.set_result((call(), None))
            except RuntimeError as error:  # torch's errors of processes that are gone or late are all of this kind
                outcome.set_result((None, str(error)))
            except BaseException as error:  # supervision point: it is raised where the outcome is waited for
                outcome.set_exception(error)

        threading.Thread(target=run, name=f"process group {self.name}", daemon=True).start()
        return outcome

    def _finish(self, outcome: Future[tuple[Result | None, str | None]], seconds: float) -> Result:
        """Wait for a call that was started, and give its thread up at the deadline.

        Operations have deadlines, but NCCL has none while it sets up a communicator, which is part of the first one.
        """
        try:
            result, problem = outcome.result(seconds + _GRACE_SECONDS)
        except TimeoutError:
            problem = f"no end of an operation within {seconds:g} s"
        if problem is not None:
            self._abort()
            raise GroupBrokenError(problem)
        return cast(Result, result)

    def _abort(self) -> None:
        process_group, self._process_group, self._store = self._process_group, None, None
        if process_group is not None:
            _abort_process_group(process_group)

    def _new_process_group(self) -> dist.ProcessGroup:
        """Do what SGLang does on its side, as rank 0. ``dist.new_group`` takes ranks of the trainer's world only."""
        with errors_are_raised():
            process_group, _ = _new_process_group_helper(
                self._world_size,
                0,
                [],
                Backend(self._backend),
                PrefixStore(self.name, self._store),
                group_name=self.name,
                timeout=datetime.timedelta(seconds=self._join_timeout),
            )
        _world.pg_group_ranks[process_group] = {rank: rank for rank in range(self._world_size)}
        # The timeout of sending: joining has to be quick.
        set_timeout(self._timeout, process_group)
        return process_group


def set_timeout(seconds: float, process_group: dist.ProcessGroup) -> None:
    """Change the deadline of operations. Public since torch 2.14, which warns about the private name."""
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    change(datetime.timedelta(seconds=seconds), process_group)
