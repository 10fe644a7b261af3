"""Token-in-token-out generation through the router: the EngineClient protocol over HTTP.

One request: wait until requests may go out (``registry.py``) → dispatch under the oldest version that may serve it →
answer → wait again if its engine is being updated → return. The second wait makes C8 hold for requests in flight: an
answer given between the arrival of new weights and their verification counts only once they are verified; if the engine
is fenced instead, the request is repeated. It is also repeated if it began with older weights than at its dispatch, on
an engine that was out and still listed by the router. A repeated request goes straight to an engine that the registry
knows to serve, whatever the router lists.

A streamed request goes the same way; the last event of its stream is the answer. Tokens are passed on before that, but
only while their engine is verified, and a repeated request retracts them.
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
from typing import NamedTuple

import aiohttp
import msgspec
import structlog

from miles_async.arguments.routing import RouterShape
from miles_async.engines.answer_guard import check_answer, experts_of
from miles_async.engines.http import Http, event_data, http_error
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError, StalledError, TransientEngineError
from miles_async.runtime.clock import now
from miles_async.runtime.loop_turns import LoopTurns
from miles_async.seams import InferenceServer
from miles_async.seams.streams import OnTokens, StreamingServer
from miles_async.staleness.versions import token_versions
from miles_async.types import GenerateRequest, Generation

log = structlog.get_logger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"  # the only header that consistent hashing looks at
ROUTED_WORKER = "x-smg-routed-worker-id"  # in the answer: the URL of the engine

_ABORT_SECONDS = 1.0
_ABORT_CALLS = 256  # at once
_ABORTS = 100  # of one request whose tokens are discarded: publications come faster than it is generated
_LONGEST_BACKOFF_SECONDS = 10.0
_WARNING_SECONDS = 10.0  # between warnings that requests fail
_READ_AT_ONCE = 3  # answers of hundreds of tokens per turn of the event loop
_EVENTS = "text/event-stream"


class _Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str
    url: str  # of the engine that answered


class RouterClient:
    """Implements ``api.EngineClient`` and ``seams.streams.StreamingClient``. One per run, on one event loop."""

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
        ``keep_aborted``: when a publication aborts requests, return partial output instead of repeating them.
        ``gate_timeout``: longest wait for engines to serve (a publication, or all engines restarting).
        ``backoff_seconds``: before the first retry, with jitter; doubles up to 10 s.
        ``routers``: of the model, if requests ask for the experts that they choose.
        ``vocabulary``: number of token ids of the model; None: unknown.
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

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``api.EngineClient``. Raises StalledError when no engine serves within the gate's deadline."""
        return await self.stream(request, None)

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens | None) -> Generation:
        """See ``seams.streams.StreamingClient``. Servers of a kind that cannot stream pass on no tokens."""
        tried, backoff = 0, self._backoff_seconds
        while True:
            try:
                return await self._try(request, tried, on_tokens)
            except EngineError as error:
                self._traffic.failed += 1
                if not isinstance(error, TransientEngineError) or tried == self._retries:
                    raise
                self._tell(error)
                if on_tokens is not None:
                    on_tokens(0, ())
            await asyncio.sleep(backoff * random.uniform(1.0, 2.0))
            tried, backoff = tried + 1, min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    def _tell(self, error: TransientEngineError) -> None:
        """Warn at most every few seconds: with an engine, hundreds of requests fail at once."""
        if now() >= self._next_warning:
            self._next_warning = now() + _WARNING_SECONDS
            log.warning("requests fail and are retried", failed_tries=self._traffic.failed, last_error=str(error))

    async def _try(self, request: GenerateRequest, tried: int, on_tokens: OnTokens | None) -> Generation:
        for _ in range(_ABORTS):
            await self._wait_until(self._registry.may_dispatch, "requests waited {} for engines")
            version, started_at = self._registry.version, time.time()
            answer = await self._request(request, version, tried, on_tokens)
            await self._answers_read.turn()  # a publication that aborts makes all engines answer at once
            await self._verified(answer.url)
            generation = self._read(answer, request, version, started_at)
            if self._keep_aborted or generation.finish_reason != "abort":
                return generation
            if on_tokens is not None:
                on_tokens(0, ())
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

    async def _request(self, request: GenerateRequest, version: int, tried: int, on_tokens: OnTokens | None) -> _Answer:
        request_id = uuid.uuid4().hex
        experts = self._routers is not None
        server, streams = self._server, on_tokens is not None
        encode = server.encode_stream if streams and isinstance(server, StreamingServer) else server.encode
        body = encode(request, request_id=request_id, version=version, experts=experts)
        url = self._router_url()
        if tried:  # each time at another engine, where there is one; the prefix cache is a small loss then
            url = self._registry.pick_serving(zlib.crc32(request.routing_key.encode()) + tried)
        try:
            with self._traffic.request(request_id, request.routing_key, version):
                async with asyncio.timeout(self._request_timeout):
                    answer = await self._post(url, request.routing_key, body, on_tokens)
        except TimeoutError:
            await self._abort(request_id)
            raise TransientEngineError(
                f"no answer within {self._request_timeout:g} s (--request-timeout): {self._registry.describe()}"
            ) from None
        except (EngineError, asyncio.CancelledError):
            await self._abort(request_id)
            raise
        if answer.status != 200:
            raise http_error(answer.status, answer.body.decode(errors="replace"))
        return answer

    async def _post(self, url: str, routing_key: str, body: bytes, on_tokens: OnTokens | None) -> _Answer:
        """Post without a deadline; cancellation closes the connection."""
        headers = {"Content-Type": "application/json", ROUTING_KEY: routing_key, **self._http.as_client}
        try:
            async with self._http.session.post(
                url + self._server.generate_path, data=body, headers=headers
            ) as response:
                engine_url = response.headers.get(ROUTED_WORKER, url)
                if on_tokens is not None and response.status == 200 and response.content_type == _EVENTS:
                    return await self._follow(response, engine_url, on_tokens)
                content_type = response.headers.get("Content-Type", "")
                return _Answer(response.status, await response.read(), content_type, engine_url)
        except aiohttp.ClientError as error:
            raise TransientEngineError(f"connection to {url} failed: {error!r}") from error

    async def _follow(self, response: aiohttp.ClientResponse, url: str, on_tokens: OnTokens) -> _Answer:
        """Pass on the tokens of a stream, and return the answer at its end."""
        assert isinstance(self._server, StreamingServer)
        token_ids: list[int] = []
        passed_on = 0
        async for data in event_data(response.content.iter_any()):
            event = self._server.read_event(data, len(token_ids), url)
            if event.answer is not None:
                with suppress(aiohttp.ClientError):  # drain it, so that the connection can be reused
                    await response.content.read()
                return _Answer(response.status, *event.answer, url)
            token_ids += event.token_ids
            engine = self._registry.answering_at(url)
            if engine is not None and engine.verified and len(token_ids) > passed_on:  # else they wait (C8)
                on_tokens(passed_on, token_ids[passed_on:])
                passed_on = len(token_ids)
        raise TransientEngineError(f"{url}: the stream ended without an answer, after {len(token_ids)} tokens")

    async def _abort(self, request_id: str) -> None:
        """Abort a request that is no longer awaited, since engines notice closed connections late.

        Only an answer says which engine has a request, so all engines are asked. Best effort, bounded in seconds and
        in calls at once: beyond these, at the end of a run or with very many engines, closing the connection must do.
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

    def _read(self, answer: _Answer, request: GenerateRequest, dispatched: int, started_at: float) -> Generation:
        """Read and check an answer. ``dispatched``: version under which the request was sent; ``started_at``: when."""
        url = answer.url
        engine = self._registry.answering_at(url)
        assert engine is not None
        versions = partial(token_versions, dispatch_version=dispatched, tokens_in_flight=engine.tokens_in_flight)
        try:
            generation = self._server.decode(answer.body, answer.content_type, url, versions)
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
