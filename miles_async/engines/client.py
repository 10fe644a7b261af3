"""Token-in-token-out generation through the router: the EngineClient protocol over HTTP.

One request: wait until requests may go out (``registry.py``) → dispatch under the oldest version that may serve it →
answer → wait again if its engine is being updated → return. The second wait makes C8 hold for requests in flight: an
answer given between the arrival of new weights and their verification counts only once they are verified; if the engine
is fenced instead, the request is repeated. It is also repeated if it began with older weights than those of its
dispatch, on an engine that was out and still listed by the router. A repeated request goes straight to an engine that
the registry knows to serve, whatever the router lists.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import aiohttp
import msgspec
import structlog

from miles_async.arguments.routing import RouterShape
from miles_async.engines.answer_guard import check_answer, experts_of
from miles_async.engines.http import ERROR_TEXT, Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError, RequestRejectedError, StalledError, TransientEngineError
from miles_async.runtime.clock import now
from miles_async.runtime.loop_turns import LoopTurns
from miles_async.seams import InferenceServer
from miles_async.staleness.versions import token_versions
from miles_async.types import GenerateRequest, Generation

log = structlog.get_logger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"  # the only header that consistent hashing looks at
ROUTED_WORKER = "x-smg-routed-worker-id"  # in the answer: the URL of the engine

_ABORT_SECONDS = 1.0
_ABORT_CALLS = 256  # at once
_ABORTS = 100  # of one request whose tokens are thrown away: publications come faster than it is generated
_LONGEST_BACKOFF_SECONDS = 10.0
_WARNING_SECONDS = 10.0  # between warnings that requests fail
_READ_AT_ONCE = 3  # answers of hundreds of tokens per turn of the event loop


class RouterClient:
    """Implements ``api.EngineClient``. One per run, on one event loop."""

    def __init__(
        self,
        server: InferenceServer,
        http: Http,
        registry: EngineRegistry,
        traffic: Traffic,
        *,
        router_url: Callable[[], str],
        request_timeout: float,
        retries: int,
        gate_timeout: float,
        keep_aborted: bool = True,
        backoff_seconds: float = 0.2,
        routers: RouterShape | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """``http``: its connections, on this event loop.
        ``keep_aborted``: when a publication aborts requests, return what was generated instead of repeating them.
        ``gate_timeout``: longest wait for engines to serve (a publication, or all engines restarting).
        ``backoff_seconds``: before the first retry, with jitter; doubles up to 10 s.
        ``routers``: of the model, if requests ask for the experts that they choose.
        ``vocabulary``: number of token ids of the model; None: not known.
        """
        self._traffic = traffic
        self._http = http
        self._registry = registry
        self._server = server
        self._router_url = router_url
        self._request_timeout = request_timeout
        self._retries = retries
        self._gate_timeout = gate_timeout
        self._keep_aborted = keep_aborted
        self._backoff_seconds = backoff_seconds
        self._routers = routers
        self._vocabulary = vocabulary
        self._abort_calls = 0  # under way
        self._next_warning = 0.0
        self._answers_read = LoopTurns(_READ_AT_ONCE)

    @property
    def in_flight(self) -> int:
        """Number of requests that are at an engine."""
        return self._traffic.in_flight

    @property
    def busy_seconds(self) -> float:
        """Seconds so far with at least one request at an engine."""
        return self._traffic.busy_seconds()

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``api.EngineClient``. Raises StalledError when no engine serves within the gate's deadline."""
        tried, backoff = 0, self._backoff_seconds
        while True:
            try:
                return await self._try(request, tried)
            except EngineError as error:
                self._traffic.failed += 1
                if not isinstance(error, TransientEngineError) or tried == self._retries:
                    raise
                self._tell(error)
            await asyncio.sleep(backoff * random.uniform(1.0, 2.0))
            tried, backoff = tried + 1, min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    def _tell(self, error: TransientEngineError) -> None:
        """Warn at most every few seconds: with an engine, hundreds of requests fail at once."""
        if now() >= self._next_warning:
            self._next_warning = now() + _WARNING_SECONDS
            log.warning("requests fail and are tried again", failed_tries=self._traffic.failed, last_error=str(error))

    async def _try(self, request: GenerateRequest, tried: int) -> Generation:
        for _ in range(_ABORTS):
            await self._wait_until(self._registry.may_dispatch, "requests waited {} for engines")
            version, started_at = self._registry.version, time.time()
            body, content_type, url = await self._request(request, version, tried)
            await self._answers_read.turn()  # a publication that aborts makes all engines answer at once
            await self._verified(url)
            generation = self._read(body, content_type, url, request, version, started_at)
            if self._keep_aborted or generation.finish_reason != "abort":
                return generation
        raise TransientEngineError(f"{generation.engines[0]} aborted a request {_ABORTS} times in a row")

    async def _wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        """Raise StalledError with ``complaint`` past the gate's deadline."""
        if condition():  # nearly always; a deadline would cost more than asking
            return
        try:
            async with asyncio.timeout(self._gate_timeout):
                await self._registry.wait_until(condition)
        except TimeoutError:
            waited = complaint.format(f"{self._gate_timeout:g} s")
            raise StalledError(f"{waited}: {self._registry.describe()}") from None

    async def _request(self, request: GenerateRequest, version: int, tried: int) -> tuple[bytes, str, str]:
        """Return (body, content type, URL of the engine that answered)."""
        request_id = uuid.uuid4().hex
        experts = self._routers is not None
        body = self._server.encode(request, request_id=request_id, version=version, experts=experts)
        url = self._router_url()
        if tried:  # each time at another engine, where there is one; the prefix cache is a small loss then
            url = self._registry.pick_serving(zlib.crc32(request.routing_key.encode()) + tried)
        try:
            with self._traffic.request(request_id, request.routing_key, version):
                async with asyncio.timeout(self._request_timeout):
                    response, answer = await self._post(url, request.routing_key, body)
        except TimeoutError:
            await self._abort(request_id)
            raise TransientEngineError(
                f"no answer within {self._request_timeout:g} s (--request-timeout): {self._registry.describe()}"
            ) from None
        except (TransientEngineError, asyncio.CancelledError):
            await self._abort(request_id)
            raise
        if response.status != 200:
            raise http_error(response.status, answer.decode(errors="replace"))
        return answer, response.headers.get("Content-Type", ""), response.headers.get(ROUTED_WORKER, url)

    async def _post(self, url: str, routing_key: str, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        """Has no deadline of its own; cancellation closes the connection."""
        headers = {"Content-Type": "application/json", ROUTING_KEY: routing_key, **self._http.as_client}
        try:
            async with self._http.session.post(
                url + self._server.generate_path, data=body, headers=headers
            ) as response:
                return response, await response.read()
        except aiohttp.ClientError as error:
            raise TransientEngineError(f"connection to {url} failed: {error!r}") from error

    async def _abort(self, request_id: str) -> None:
        """Abort a request that is no longer awaited, since engines notice closed connections late.

        Only an answer tells which engine has a request, so all of them are told. Best effort, bounded in seconds and
        in calls at once: past these, at the end of a run or with very many engines, closed connections must do.
        """
        urls = self._registry.urls()
        if self._abort_calls + len(urls) > _ABORT_CALLS:
            return
        self._abort_calls += len(urls)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS), asyncio.TaskGroup() as scope:
                    for url in urls:
                        scope.create_task(self._abort_at(url, request_id))
        finally:
            self._abort_calls -= len(urls)

    async def _abort_at(self, url: str, request_id: str) -> None:
        with suppress(EngineError):
            await self._server.abort(url, request_id, _ABORT_SECONDS)

    async def _verified(self, engine_url: str) -> None:
        """Wait until the answer of this engine may be used. Raises TransientEngineError if the engine was fenced."""

        def known() -> bool:
            engine = self._registry.answering_at(engine_url)
            return engine is None or engine.verified

        await self._wait_until(known, "an answer waited {} for its engine to be verified")
        if self._registry.answering_at(engine_url) is None:
            raise TransientEngineError(f"engine at {engine_url} was fenced while it answered")

    def _read(
        self, body: bytes, content_type: str, url: str, request: GenerateRequest, dispatched: int, started_at: float
    ) -> Generation:
        """Read and check an answer. ``dispatched``: version under which the request was sent; ``started_at``: when."""
        engine = self._registry.answering_at(url)
        assert engine is not None
        versions = partial(token_versions, dispatch_version=dispatched, tokens_in_flight=engine.tokens_in_flight)
        try:
            generation = self._server.decode(body, content_type, url, versions)
            check_answer(generation, request, self._vocabulary, url)
            experts = None if self._routers is None else experts_of(generation, request, self._routers, url)
        except TransientEngineError as error:
            self._registry.note_wrong_answer(engine, str(error))
            raise
        if len(generation.weight_versions) and (first := generation.weight_versions[0]) < dispatched:
            raise TransientEngineError(
                f"{url} began a request of version {dispatched} with version {first}: "
                "the router still listed it when it was out"
            )
        self._traffic.completed[engine.engine_id] += 1
        return msgspec.structs.replace(
            generation,
            engines=(engine.engine_id,),
            routed_experts=experts,
            started_at=started_at,
            finished_at=time.time(),
        )


def http_error(status: int, text: str) -> EngineError:
    """Classify an answer other than 200: the request's own fault, or worth another try."""
    shown = f"HTTP {status}: {text[:ERROR_TEXT]}"
    if status >= 500 or status in (408, 429) or (status == 404 and "model_not_found" in text):
        return TransientEngineError(shown)
    return RequestRejectedError(shown)
