"""Token-in-token-out generation through the router: the EngineClient protocol over HTTP.

One request goes: wait until requests may go out (``registry.py``) → dispatch under the oldest version that may
serve it → answer → wait again if its engine is being updated → return. The second wait is what makes C8
hold for requests in flight: what an engine answered between the arrival of new weights and their
verification counts only once they are verified; if its engine is fenced instead, the request is done again. So is one
that was begun with older weights than those of its dispatch: by an engine that was out and still listed by the router.
What is done again goes straight to an engine that the registry knows to serve, whatever the router lists.

Every request carries ``extra_key=v<version>``, which is part of SGLang's prefix-cache key: after an in-place
update, which flushes nothing, new requests never reuse what older weights computed. (Under a rolling publication an
updated engine gets requests with the key of the version before, too. It has flushed its cache, so they find nothing
older than itself; in_place is refused there.)
"""

from __future__ import annotations

import asyncio
import random
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import structlog

from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.sglang.answers import PACK, read_answer
from miles_async.engines.sglang.api import EngineApi
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError, RequestRejectedError, StalledError, TransientEngineError
from miles_async.runtime.clock import now
from miles_async.runtime.turns import Turns
from miles_async.types import Generation, VersionSpan

log = structlog.get_logger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"  # the only header that consistent hashing looks at
ROUTED_WORKER = "x-smg-routed-worker-id"  # in the answer: the URL of the engine

_ABORT_SECONDS = 1.0
_ABORT_CALLS = 256  # at once
_ABORTS = 100  # of one request, where what was generated is thrown away: it waits for a longer publication interval
_LONGEST_BACKOFF_SECONDS = 10.0
_WARNING_SECONDS = 10.0  # between warnings that requests fail
_READ_AT_ONCE = 3  # answers of hundreds of tokens
_ERROR_TEXT = 500  # characters of an answer that go into a message


ParseVersions = Callable[[object, object, int, int, int], tuple[VersionSpan, ...]]
"""``staleness.versions.parse_spans``: (reported spans or None, reported label or None, number of output tokens, version
at dispatch, tokens that the engine may have in flight) → spans. Raises VersionUnknownError.
"""


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request."""

    status: int
    body: bytes
    content_type: str
    engine_url: str
    dispatch_version: int


class RouterClient:
    """Implements ``api.EngineClient``. One per run, on one event loop."""

    def __init__(
        self,
        http: Http,
        registry: EngineRegistry,
        traffic: Traffic,
        *,
        router_url: Callable[[], str],
        parse_versions: ParseVersions,
        request_timeout: float,
        retries: int,
        gate_timeout: float,
        keep_aborted: bool = True,
        backoff_seconds: float = 0.2,
    ) -> None:
        """``keep_aborted``: a publication that aborts requests gives the caller what was generated; else they are
        generated anew. ``gate_timeout``: longest wait for engines to serve (a publication, or all engines restarting).
        ``backoff_seconds``: before the first retry, with jitter; doubles up to 10 s.
        """
        self._traffic = traffic
        self._http = http
        self._registry = registry
        self._api = EngineApi(http)
        self._router_url = router_url
        self._parse_versions = parse_versions
        self._request_timeout = request_timeout
        self._retries = retries
        self._gate_timeout = gate_timeout
        self._keep_aborted = keep_aborted
        self._backoff_seconds = backoff_seconds
        self._abort_calls = 0  # under way
        self._next_warning = 0.0
        self._answers_read = Turns(_READ_AT_ONCE)

    @property
    def in_flight(self) -> int:
        """Requests at an engine now."""
        return self._traffic.in_flight

    @property
    def busy_seconds(self) -> float:
        """Seconds so far with at least one request at an engine."""
        return self._traffic.busy_seconds()

    async def close(self) -> None:
        """Close the shared HTTP session."""
        await self._http.close()

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, Any], *, routing_key: str) -> Generation:
        """See ``api.EngineClient``. Raises StalledError when no engine serves within the gate's
        deadline.
        """
        tried, backoff = 0, self._backoff_seconds
        while True:
            try:
                return await self._try(input_ids, sampling, routing_key, tried)
            except EngineError as error:
                self._traffic.failed += 1
                if not isinstance(error, TransientEngineError) or tried == self._retries:
                    raise
                self._tell(error)
            await asyncio.sleep(backoff * random.uniform(1.0, 2.0))
            tried, backoff = tried + 1, min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    def _tell(self, error: TransientEngineError) -> None:
        """Not of every request: with an engine, hundreds fail at once."""
        if now() >= self._next_warning:
            self._next_warning = now() + _WARNING_SECONDS
            log.warning("requests fail and are tried again", failed_tries=self._traffic.failed, last_error=str(error))

    async def _try(
        self, input_ids: Sequence[int], sampling: Mapping[str, Any], routing_key: str, tried: int
    ) -> Generation:
        for _ in range(_ABORTS):
            await self._wait_until(self._registry.may_dispatch, "requests waited {} for engines")
            response = await self._request(input_ids, sampling, routing_key, tried)
            await self._answers_read.turn()  # a publication that aborts makes all engines answer at once
            await self._verified(response.engine_url)
            generation = self._generation(response)
            if self._keep_aborted or generation.finish_reason != "abort":
                return generation
        raise TransientEngineError(f"{generation.engine_id} aborted a request {_ABORTS} times in a row")

    async def _wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        """Raises StalledError with ``complaint`` past the gate's deadline."""
        if condition():  # nearly always; a deadline would cost more than asking
            return
        try:
            async with asyncio.timeout(self._gate_timeout):
                await self._registry.wait_until(condition)
        except TimeoutError:
            waited = complaint.format(f"{self._gate_timeout:g} s")
            raise StalledError(f"{waited}: {self._registry.describe()}") from None

    async def _request(
        self, input_ids: Sequence[int], sampling: Mapping[str, Any], routing_key: str, tried: int
    ) -> _Response:
        request_id = uuid.uuid4().hex
        version = self._registry.version
        body = {
            "rid": request_id,
            "input_ids": list(map(int, input_ids)),
            "sampling_params": dict(sampling),
            "return_logprob": True,
            "extra_key": f"v{version}",
            PACK: True,
        }
        url = self._router_url()
        if tried:  # each time at another engine, where there is one; the prefix cache is a small loss then
            url = self._registry.one_that_takes(zlib.crc32(routing_key.encode()) + tried)
        try:
            with self._traffic.request(request_id, routing_key, version):
                async with asyncio.timeout(self._request_timeout):
                    response = await self._post(url, msgspec.json.encode(body), routing_key, version)
        except TimeoutError:
            await self._abort(request_id)
            raise TransientEngineError(
                f"no answer within {self._request_timeout:g} s (--request-timeout): {self._registry.describe()}"
            ) from None
        except aiohttp.ClientError as error:
            await self._abort(request_id)
            raise TransientEngineError(f"connection to {url} failed: {error!r}") from error
        except asyncio.CancelledError:
            await self._abort(request_id)
            raise
        if response.status != 200:
            raise http_error(response.status, response.body.decode(errors="replace"))
        return response

    async def _post(self, url: str, body: bytes, routing_key: str, version: int) -> _Response:
        """Post to ``url``, an engine's or that of the router, which names the engine that it asked."""
        headers = {"Content-Type": "application/json", ROUTING_KEY: routing_key}
        async with self._http.session.post(f"{url}/generate", data=body, headers=headers) as response:
            return _Response(
                status=response.status,
                body=await response.read(),
                content_type=response.headers.get("Content-Type", ""),
                engine_url=response.headers.get(ROUTED_WORKER, url),
                dispatch_version=version,
            )

    async def _abort(self, request_id: str) -> None:
        """End a request that nobody waits for any more: an engine notices a closed connection late.

        Which engine has it is only known from its answer, so all are asked; best effort, bounded in time, and in calls:
        at the end of a run, or with very many engines, closed connections have to do.
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
            await self._api.abort(url, request_id, _ABORT_SECONDS)

    async def _verified(self, engine_url: str) -> None:
        """Until what this engine answered may be used; raises TransientEngineError if it was fenced
        instead.
        """

        def known() -> bool:
            engine = self._registry.answering_at(engine_url)
            return engine is None or engine.verified

        await self._wait_until(known, "an answer waited {} for its engine to be verified")
        if self._registry.answering_at(engine_url) is None:
            raise TransientEngineError(f"engine at {engine_url} was fenced while it answered")

    def _generation(self, response: _Response) -> Generation:
        answer = read_answer(response.body, response.content_type, response.engine_url)
        engine = self._registry.answering_at(response.engine_url)
        assert engine is not None
        spans = self._parse_versions(
            answer.meta.weight_versions,
            answer.meta.weight_version,
            len(answer.output_ids),
            response.dispatch_version,
            engine.tokens_in_flight,
        )
        if spans and spans[0].version < response.dispatch_version:
            raise TransientEngineError(
                f"{response.engine_url} began a request of version {response.dispatch_version} with version "
                f"{spans[0].version}: the router still listed it when it was out"
            )
        self._traffic.completed[engine.engine_id] += 1
        return Generation(
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            spans=spans,
            finish_reason=answer.finish_reason,
            engine_id=engine.engine_id,
            cached_tokens=answer.meta.cached_tokens,
            prompt_tokens=answer.meta.prompt_tokens,
        )


def http_error(status: int, text: str) -> EngineError:
    """What an answer other than 200 means: the request's own fault, or worth another try."""
    shown = f"HTTP {status}: {text[:_ERROR_TEXT]}"
    if status >= 500 or status in (408, 429) or (status == 404 and "model_not_found" in text):
        return TransientEngineError(shown)
    return RequestRejectedError(shown)
