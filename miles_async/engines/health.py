"""Checks of engines: whether a server answers, holds its weights, generates, and has requests left."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TypeVar

import structlog

from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.errors import EngineError
from miles_async.runtime.clock import now
from miles_async.seams import InferenceServer

T = TypeVar("T")

log = structlog.get_logger(__name__)

_PROBE_INTERVAL = 5.0
_PROBE_SECONDS = 10.0
_PROBE_FAILURES = 6  # in a row, before a live process counts as unreachable
_PROBE_PATIENCE = 8.0
_PROGRESS_INTERVAL = 5.0
_PROGRESS_SECONDS = 30.0
_PROGRESS_FAILURES = 5  # in a row, before an engine that answers and generates nothing counts as stuck
_PROGRESS_PATIENCE = 15.0  # a long prefill yields no token meanwhile
_PATIENCE_FACTOR = 5.0  # times the longest of recent answers, if that is more
_FEWEST_ANSWERS, _MOST_ANSWERS = 3, 100  # recent ones
_LOOK_SECONDS = 0.5
_HOST_SECONDS = 2.0

OnHost = Callable[[Callable[[Path], None], int], Awaitable[None]]
"""``ServerHandle.on_host``."""
_DRAIN_POLL_SECONDS = 0.2
_QUIET_POLLS = 10  # in a row


class SilentEngineError(EngineError):
    """An engine does not answer although others have meanwhile."""


class Question:
    """A question that engines are asked repeatedly, and how long each takes to answer. It distinguishes a stopped
    engine from a slow machine: only the former takes longer than ever while others answer.
    """

    def __init__(self, registry: EngineRegistry, patience: float) -> None:
        """``patience``: seconds that an answer may take, or ``_PATIENCE_FACTOR`` times the longest recent one."""
        self._registry = registry
        self._patience = patience
        self._seconds: dict[str, deque[float]] = {}  # engine id → of its recent answers
        self._answered: dict[str, float] = {}  # engine id → when its last answered question was asked

    async def ask(self, record: EngineRecord, answer: Coroutine[object, object, T], may_fail: Callable[[], bool]) -> T:
        """Await an answer. Raises what it raises, and SilentEngineError once it is overdue, unless ``may_fail()``."""
        asked, engine = now(), record.engine_id
        recent = self._seconds.setdefault(engine, deque(maxlen=_MOST_ANSWERS))
        patience = max(self._patience, _PATIENCE_FACTOR * max(recent, default=0.0))
        task, alone = asyncio.ensure_future(answer), 0
        try:
            while not task.done():
                await asyncio.wait([task], timeout=min(_LOOK_SECONDS, patience))
                overdue = now() - asked >= patience and len(recent) >= _FEWEST_ANSWERS
                alone = alone + 1 if overdue and not may_fail() and self._others_answer(engine, asked) else 0
                if alone > 1 and not task.done():  # seen twice: our own event loop may be late
                    raise SilentEngineError(f"did not answer within {patience:.2g} s, and others did")
            result = task.result()
        finally:
            task.cancel()
        recent.append(now() - asked)
        self._answered[engine] = asked
        return result

    def _others_answer(self, engine: str, since: float) -> bool:
        serving = (record.engine_id for record in self._registry.in_state(EngineState.SERVING))
        return any(other != engine and self._answered.get(other, since) > since for other in serving)

    def forget(self, record: EngineRecord) -> None:
        """Forget the answers of the engine's earlier start."""
        self._seconds.pop(record.engine_id, None)


class EngineHealth:
    """Each watch returns when its condition has come true; the first two return why the engine must be restarted."""

    def __init__(self, server: InferenceServer, registry: EngineRegistry) -> None:
        self._server = server
        self._probes = Question(registry, _PROBE_PATIENCE)
        self._progress = Question(registry, _PROGRESS_PATIENCE)

    async def until_unusable(self, record: EngineRecord, on_host: OnHost) -> str:
        """Detect machines that vanish without closing connections, and servers whose weights something else changed."""
        failures, url = 0, record.url
        assert url is not None
        self._probes.forget(record)
        while failures < _PROBE_FAILURES:
            await asyncio.sleep(_PROBE_INTERVAL)
            expected = record.version if record.verified else None
            probe = self._server.weight_version(url, _PROBE_SECONDS)
            try:
                found = await self._probes.ask(record, probe, may_fail=lambda: record.state is not EngineState.SERVING)
                failures = 0
            except EngineError as error:
                if isinstance(error, SilentEngineError) and await _in_reach(on_host):
                    return str(error)
                failures += 1
                log.warning("engine does not answer", engine=record.engine_id, failures=failures, error=str(error))
                continue
            still = record.version if record.verified else None
            if expected is not None and still == expected and found != str(expected):
                return f"says that it holds version {found}, and was given {expected}"
        return f"did not answer {failures} times in a row"

    async def until_stuck(self, record: EngineRecord, on_host: OnHost) -> str:
        """Detect servers that answer questions and generate nothing, other than in a pause."""
        failures, url = 0, record.url
        assert url is not None
        self._progress.forget(record)

        def excused() -> bool:
            return record.paused or record.version != version or record.state is not EngineState.SERVING

        while failures < _PROGRESS_FAILURES:
            await asyncio.sleep(_PROGRESS_INTERVAL)
            if record.state is not EngineState.SERVING or record.paused:
                continue
            version = record.version
            try:
                await self._progress.ask(record, self._server.make_progress(url, _PROGRESS_SECONDS), may_fail=excused)
                failures = 0
            except EngineError as error:
                if isinstance(error, SilentEngineError) and await _in_reach(on_host):
                    return "generated nothing for longer than ever, while others did"
                if not excused():
                    failures += 1
                    log.warning(
                        "engine generates nothing", engine=record.engine_id, failures=failures, error=str(error)
                    )
        return f"generated nothing {failures} times in a row"

    async def until_quiet(self, url: str) -> None:
        """Wait until the server has had no requests for a while: the router's last ones reach its queue a little later.
        Raises EngineError.
        """
        quiet = 0
        while quiet < _QUIET_POLLS:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            load = await self._server.load(url, _PROBE_SECONDS)
            quiet = 0 if load.running or load.waiting else quiet + 1


async def _in_reach(on_host: OnHost) -> bool:
    """Return whether the engine's host answers: else its link is down, which is no reason to restart the engine."""
    try:
        async with asyncio.timeout(_HOST_SECONDS):
            await on_host(_nothing, 0)
    except (TimeoutError, EngineError):
        return False
    return True


def _nothing(_: Path) -> None: ...
