"""Checks of engines: whether a server answers, holds its weights, generates, and has requests left."""

from __future__ import annotations

import asyncio

import structlog

from miles_async.engines.kind import InferenceServer
from miles_async.engines.registry import EngineRecord, EngineState
from miles_async.errors import EngineError

log = structlog.get_logger(__name__)

_PROBE_INTERVAL = 5.0
_PROBE_SECONDS = 10.0
_PROBE_FAILURES = 6  # in a row, before a live process counts as unreachable
_PROGRESS_INTERVAL = 30.0
_PROGRESS_SECONDS = 30.0
_PROGRESS_FAILURES = 3  # in a row, before an engine that answers and generates nothing counts as stuck
_DRAIN_POLL_SECONDS = 0.2
_QUIET_POLLS = 10  # in a row


class EngineHealth:
    """Each watch returns when its condition has come true; the first two return why the engine must be restarted."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    async def until_unusable(self, record: EngineRecord) -> str:
        """Detect machines that vanish without closing connections, and servers that somebody else gave other
        weights.
        """
        failures, url = 0, record.url
        assert url is not None
        while failures < _PROBE_FAILURES:
            await asyncio.sleep(_PROBE_INTERVAL)
            expected = record.version if record.verified else None
            try:
                found = await self._server.weight_version(url, _PROBE_SECONDS)
                failures = 0
            except EngineError as error:
                failures += 1
                log.warning("engine does not answer", engine=record.engine_id, failures=failures, error=str(error))
                continue
            still = record.version if record.verified else None
            if expected is not None and still == expected and found != str(expected):
                return f"says that it holds version {found}, and was given {expected}"
        return f"did not answer {failures} times in a row"

    async def until_stuck(self, record: EngineRecord) -> str:
        """Detect servers that answer questions and generate nothing, other than in a pause."""
        failures, url = 0, record.url
        assert url is not None
        while failures < _PROGRESS_FAILURES:
            await asyncio.sleep(_PROGRESS_INTERVAL)
            if record.state is not EngineState.SERVING or record.paused:
                continue
            version = record.version
            try:
                await self._server.make_progress(url, _PROGRESS_SECONDS)
                failures = 0
            except EngineError as error:
                if not record.paused and record.version == version:
                    failures += 1
                    log.warning(
                        "engine generates nothing", engine=record.engine_id, failures=failures, error=str(error)
                    )
        return f"generated nothing {failures} times in a row"

    async def until_quiet(self, url: str) -> None:
        """Wait until the server has had no requests for a while, since those that the router passed on last reach its
        queue a little later. Raises EngineError.
        """
        quiet = 0
        while quiet < _QUIET_POLLS:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            load = await self._server.load(url, _PROBE_SECONDS)
            quiet = 0 if load.running or load.waiting else quiet + 1
