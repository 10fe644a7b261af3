"""Worker processes for functions that may hang, die, or need a main thread.

A worker that is late, dies, or whose caller gives up is killed; the next call gets another one. Workers start when
they are needed, and die with this process.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from miles_async.errors import RewardError, ServiceUnavailableError

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_ROOT = str(Path(__file__).resolve().parents[2])  # where this package can be imported from, installed or not
_END_SECONDS = 5.0  # from closing its pipes to the end of a process
_START_SECONDS = 120.0  # to start Python and import what the function needs, from a slow disk too


class WorkerPool:
    """Pool of worker processes, for use on one event loop."""

    def __init__(self, size: int, timeout: float) -> None:
        """``size``: processes at most. ``timeout``: seconds a call may take from when it has a worker."""
        self._timeout = timeout
        self._turns = asyncio.Semaphore(size)
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def call(
        self, function: Callable[..., Any], *arguments: Any, needs: Sequence[str] = (), more_seconds: float = 0.0
    ) -> Any:
        """Call ``function(*arguments)`` in a worker: a function of a module, JSON in and out.

        ``needs``: modules to import before its time runs. ``more_seconds``: beyond the timeout, for a function that
        keeps it itself. Raises RewardError if it raises or takes too long, which is its arguments' doing;
        ServiceUnavailableError if it raises that, or the worker doesn't start or dies, which the machine may do, too.
        """
        request = msgspec.json.encode([needs, function.__module__, function.__qualname__, arguments])
        async with self._turns:
            worker = await self._take()
            try:
                kind, result = await self._ask(worker, request, self._timeout + more_seconds)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise ServiceUnavailableError(
                    f"the process that verifies died (exit status {await _end(worker)})"
                ) from None
            except BaseException:  # a worker that was interrupted cannot be used again
                _kill(worker)
                raise
            self._idle.append(worker)
        if kind == "outage":
            raise ServiceUnavailableError(result)
        if kind == "error":
            raise RewardError(result)
        return result

    async def close(self) -> None:
        """End all workers. Calls under way fail."""
        for worker in list(self._all):
            _kill(worker)
            await worker.wait()

    async def _take(self) -> Process:
        while self._idle:
            worker = self._idle.pop()
            if worker.returncode is None:  # otherwise it died while idle
                return worker
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "miles_async.rewards.worker", str(os.getpid())),
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the parent, which ends it
        )
        self._all = {known for known in self._all if known.returncode is None} | {worker}
        return worker

    async def _ask(self, worker: Process, request: bytes, timeout: float) -> tuple[str, object]:
        assert worker.stdin is not None
        message = b""
        try:
            async with asyncio.timeout(_START_SECONDS):
                worker.stdin.write(len(request).to_bytes(4, "big") + request)
                await worker.stdin.drain()
                message = await _read(worker)
        except TimeoutError:
            raise ServiceUnavailableError(
                f"a process that verifies took longer than {_START_SECONDS:g} s to start"
            ) from None
        try:
            async with asyncio.timeout(timeout):
                message = message or await _read(worker)  # empty: the function runs
        except TimeoutError:
            raise RewardError(f"took longer than --reward-timeout {self._timeout:g} s") from None
        kind, result = msgspec.json.decode(message)
        return kind, result


def _environment() -> dict[str, str]:
    """Without keys: some tasks of reasoning-gym evaluate the answer."""
    kept = {name: text for name, text in os.environ.items() if not _SECRET.search(name)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))}


def _kill(worker: Process) -> None:
    with suppress(ProcessLookupError):
        worker.kill()


async def _end(worker: Process) -> int:
    """Return the exit status of a worker that is about to end. It is not killed at once: ``Popen.kill`` would poll for
    its end, and take the status away from asyncio.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            return await worker.wait()
    _kill(worker)
    return await worker.wait()


async def _read(worker: Process) -> bytes:
    assert worker.stdout is not None
    length = int.from_bytes(await worker.stdout.readexactly(4), "big")
    return await worker.stdout.readexactly(length)
