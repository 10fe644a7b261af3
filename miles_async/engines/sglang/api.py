"""The protocol of an SGLang server (0.5.23) as an ``InferenceServer``."""

from __future__ import annotations

import asyncio
import functools
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import aiohttp
import msgspec
import numpy as np
import orjson

from miles_async.engines.http import ERROR_TEXT, Http, decode_json
from miles_async.engines.sglang import STREAM
from miles_async.engines.sglang.answers import DECODER, PACK, TEXT_FROM, read_answer, read_event
from miles_async.engines.sglang.held_report import (
    FINGERPRINT_ACTION,
    REPORT_ACTION,
    fingerprint,
    join_fingerprints,
    read_reports,
)
from miles_async.engines.sglang.scores import PACK_SCORES, read_scores
from miles_async.errors import EngineError, EngineTimeoutError, RequestRejectedError
from miles_async.runtime.loop_turns import LoopTurns
from miles_async.seams import InferenceServer, TokenVersions
from miles_async.seams.streams import StreamEvent
from miles_async.types import (
    CanaryScore,
    EngineLoad,
    GenerateRequest,
    Generation,
    HeldWeights,
    Int32,
    JsonObject,
    Picture,
    TensorMeta,
    TensorShare,
)

Operation = TypeVar("Operation", bound=Callable[..., Any])

UNKNOWN_TOKENS_IN_FLIGHT = 1 << 31
"""More than any response has, so that all its tokens count as old as the oldest. For servers that don't report the
number, or verify more tokens than they were started with (``--speculative-adaptive``).
"""

_TARGET = {"selector": "target"}  # no draft model; servers that the run starts need not be told (patches.py)

MEMORY_TAGS = ["kv_cache", "weights", "cuda_graph"]

# Servers close connections that were idle for some seconds, maybe just as the next call goes out, which would look like
# an engine that died.
_HEADERS = {"Content-Type": "application/json", "Connection": "close"}

_LEAVING_SECONDS = 5.0  # for a server that answered just now to leave a process group

_CALLS_AT_ONCE = 8  # begun per turn of the event loop, 0.2 ms each: requests wait for the loop meanwhile


class _ModelInfo(msgspec.Struct):
    """The part of GET /model_info that we read."""

    weight_version: str  # "default" until weights were published


class _ServerInfo(msgspec.Struct):
    """The part of GET /server_info that we read: SGLang's arguments, as resolved."""

    speculative_algorithm: str | msgspec.UnsetType | None = msgspec.UNSET
    speculative_num_draft_tokens: int | None = None
    speculative_adaptive: bool = False

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that one forward pass may yield for a request: one, or as many as it verifies."""
        if self.speculative_algorithm is None:
            return 1
        if self.speculative_num_draft_tokens is None or self.speculative_adaptive:
            return UNKNOWN_TOKENS_IN_FLIGHT
        return max(1, self.speculative_num_draft_tokens)


class _SchedulerLoad(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float  # excluding what the prefix cache could release


class _Loads(msgspec.Struct):
    """The part of GET /v1/loads that we read: one load per data-parallel scheduler."""

    loads: list[_SchedulerLoad]


class _RankCheck(msgspec.Struct):
    checksums: dict[str, str]  # action of held_report.py → its answer


class _CheckReply(msgspec.Struct):
    ranks: list[_RankCheck]


def _post(declared: Operation, path: str, *names: str, **fixed: object) -> Operation:
    """An operation, declared by ``InferenceServer``, that POSTs its arguments under these names, and fixed values."""

    @functools.wraps(declared)
    async def operation(server: SGLangServer, url: str, *arguments: Any) -> None:
        *given, timeout = arguments
        await server._call(url, path, timeout, dict(zip(names, given, strict=True)) | fixed)

    return cast(Operation, operation)


def engine_inputs(request: GenerateRequest) -> tuple[Int32, JsonObject]:
    """Token ids as the engine expects them, and the fields of its request that hold the images: one token for each
    image, where the model reads many.

    SGLang (0.5.23) makes pixels of the files with the checkpoint's own processor, as the trainer does, and repeats the
    token of an image as often as it has parts; the other tokens stay as they are (SGLANG_MM_AVOID_RETOKENIZE, on by
    default). Where it cannot do that, it decodes them and tokenizes the text again, with no more than a warning: the
    number of prompt tokens in its answer then mostly is another than ours (``answer_guard``).
    """
    if not request.pictures:
        return request.input_ids, {}
    assert request.image_token is not None, "pictures have a token"
    tokens = request.input_ids
    repeated = (tokens[1:] == request.image_token) & (tokens[:-1] == request.image_token)
    first = np.concatenate([[True], ~repeated])  # chat templates write tokens between two images
    return tokens[first], {"image_data": [_data_url(picture) for picture in request.pictures]}


def _taken_as(version: int) -> JsonObject:
    """Fields of a request with weights. Publications flush the cache before, so the server needs not."""
    return {"flush_cache": False, "weight_version": str(version)}


def _data_url(picture: Picture) -> str:
    """Bare base64 would do, but for JPEG: that begins with a slash, which SGLang takes for a path."""
    return "data:image;base64," + b64encode(picture.content).decode()


class SGLangServer:
    """Implements ``seams.InferenceServer`` and ``seams.streams.StreamingServer``."""

    generate_path = "/generate"

    # Operations that are one POST.
    pause = _post(InferenceServer.pause, "/pause_generation", "mode")
    resume = _post(InferenceServer.resume, "/continue_generation")
    flush_cache = _post(InferenceServer.flush_cache, "/flush_cache")
    abort = _post(InferenceServer.abort, "/abort_request", "rid")
    abort_all = _post(InferenceServer.abort_all, "/abort_request", abort_all=True)
    join_group = _post(
        InferenceServer.join_group, "/init_weights_update_group",
        "rank_offset", "group_name", "master_address", "master_port", "world_size", "backend",
    )  # fmt: skip
    leave_group = _post(InferenceServer.leave_group, "/destroy_weights_update_group", "group_name")
    begin_update = _post(InferenceServer.begin_update, "/begin_weight_update", **_TARGET)
    end_update = _post(InferenceServer.end_update, "/end_weight_update")
    # Both need a server that was started with --enable-memory-saver, the former one without requests.
    release_memory = _post(InferenceServer.release_memory, "/release_memory_occupation", tags=MEMORY_TAGS)
    retake_memory = _post(InferenceServer.retake_memory, "/resume_memory_occupation", tags=MEMORY_TAGS)

    def __init__(self, http: Http) -> None:
        self._http = http
        self._turns = LoopTurns(_CALLS_AT_ONCE)

    def encode(self, request: GenerateRequest, *, request_id: str, version: int, experts: bool) -> bytes:
        """``extra_key`` is part of SGLang's prefix-cache key: after an in-place update, which flushes nothing, new
        requests never reuse what older weights computed. (Under a rolling publication an updated server gets requests
        with the key of the version before, too. It has flushed its cache, so they find nothing older than itself;
        in_place is refused there.)
        """
        return msgspec.json.encode(self._body(request, request_id, version, experts))

    def encode_stream(self, request: GenerateRequest, *, request_id: str, version: int, experts: bool) -> bytes:
        """Like :meth:`encode`, for an answer that is streamed."""
        return msgspec.json.encode({**self._body(request, request_id, version, experts), "stream": True})

    def _body(self, request: GenerateRequest, request_id: str, version: int, experts: bool) -> dict[str, object]:
        input_ids, image_fields = engine_inputs(request)
        body = {
            **image_fields,
            "rid": request_id,
            "input_ids": msgspec.Raw(orjson.dumps(input_ids, option=orjson.OPT_SERIALIZE_NUMPY)),
            "sampling_params": dict(request.sampling),
            "return_logprob": True,
            "extra_key": f"v{version}",
            PACK: True,
        }
        if request.decoder_id is not None:
            shorter = len(request.input_ids) - len(input_ids)  # in the prompt, before any text
            body |= {DECODER: request.decoder_id, TEXT_FROM: request.text_from - shorter}
        if experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
        return body

    def decode(self, body: bytes, content_type: str, url: str, versions: TokenVersions) -> Generation:
        return read_answer(body, content_type, url, versions)

    def read_event(self, data: bytes, before: int, url: str) -> StreamEvent:
        return read_event(data, before, url)

    async def weight_version(self, url: str, timeout: float) -> str:
        """The label of the weights: a number, or "default" before the first publication."""
        answer = await self._call(url, "/model_info", timeout)
        return decode_json(answer, _ModelInfo, f"{url}/model_info").weight_version

    async def probe(self, url: str, timeout: float) -> int:
        """Wait for the answers of all schedulers, paused or not."""
        answer = await self._call(url, "/server_info", timeout)
        return decode_json(answer, _ServerInfo, f"{url}/server_info").tokens_in_flight

    async def make_progress(self, url: str, timeout: float) -> None:
        """Wait for a token of any request; an idle server generates one. SGLang gives up after 20 s."""
        await self._call(url, "/health_generate", timeout)

    async def load(self, url: str, timeout: float) -> EngineLoad:
        """Cheap: the HTTP process reads what schedulers leave in shared memory, at every prefill and every 15th decode
        step. While paused they leave nothing.
        """
        loads = decode_json(await self._call(url, "/v1/loads", timeout), _Loads, f"{url}/v1/loads").loads
        if not loads:
            raise EngineError(f"{url}/v1/loads: expected the load of a scheduler, found none yet")
        return EngineLoad(
            running=sum(load.num_running_reqs for load in loads),
            waiting=sum(load.num_waiting_reqs for load in loads),
            kv_use=max(load.token_usage for load in loads),
        )

    async def receive_stream(self, url: str, group_names: Sequence[str], version: int, timeout: float) -> None:
        """Needs a server that was started by our launcher (``weight_stream.py``)."""
        body = {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": " ".join(group_names),
            "load_format": STREAM,
            **_taken_as(version),
        }
        async with self._leaving(url, group_names, timeout):
            await self._call(url, "/update_weights_from_distributed", timeout, body)

    async def receive_bucket(
        self, url: str, group_name: str, tensors: Sequence[TensorMeta], version: int, timeout: float
    ) -> None:
        """The server claims ``version`` from the first bucket on."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            **_TARGET,
            **_taken_as(version),
        }
        async with self._leaving(url, [group_name], timeout):
            await self._call(url, "/update_weights_from_distributed", timeout, body)

    @asynccontextmanager
    async def _leaving(self, url: str, group_names: Sequence[str], timeout: float) -> AsyncIterator[None]:
        """A server that refuses is still a member, for whom all others would wait, so it leaves the groups."""
        try:
            yield
        except EngineTimeoutError:
            raise
        except EngineError:
            leaving = (self.leave_group(url, name, min(timeout, _LEAVING_SECONDS)) for name in group_names)
            await asyncio.gather(*leaving, return_exceptions=True)
            raise

    async def receive_handles(self, url: str, handles: str, ranks: int, version: int, timeout: float) -> None:
        """Every rank opens the same device memory."""
        body = {
            "serialized_named_tensors": [handles] * ranks,
            "load_format": "flattened_bucket",
            **_TARGET,
            **_taken_as(version),
        }
        await self._call(url, "/update_weights_from_tensor", timeout, body)

    async def load_files(self, url: str, directory: str, version: int, timeout: float) -> None:
        """SGLang's loader restores and post-processes by itself. A file that it cannot read ends the server."""
        body = {
            "model_path": directory,
            "load_format": "safetensors",  # not what the server was started with, which reads no files
            **_taken_as(version),
        }
        await self._call(url, "/update_weights_from_disk", timeout, body)

    async def report_weights(self, url: str, share: TensorShare, timeout: float) -> str:
        """Needs a server that was started with HELD_WEIGHTS_VARIABLE."""
        share_text = msgspec.json.encode(share).decode()
        return join_fingerprints(await self._check_weights(url, FINGERPRINT_ACTION, share_text, timeout))

    async def held_weights(self, url: str, report: str, timeout: float) -> HeldWeights:
        ranks = await self._check_weights(url, REPORT_ACTION, "", timeout)
        if (found := join_fingerprints(map(fingerprint, ranks))) != report:
            raise EngineError(f"{url}: expected the report of its weights with fingerprint {report}, found {found}")
        try:
            return read_reports(ranks)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{url}: expected a report of its weights, found {ranks[0][:ERROR_TEXT]!r}") from error

    async def score(self, url: str, tokens: Sequence[int], timeout: float, *, first: int = 1) -> CanaryScore:
        """SGLang computes all positions from ``logprob_start_len`` on, so that from 0 on no prefix cache hides wrong
        weights.
        """
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
            PACK_SCORES: True,
        }
        answer = await self._call(url, "/generate", timeout, body, self._http.as_client)
        return read_scores(answer, len(tokens) - first, f"{url}/generate")

    async def _check_weights(self, url: str, action: str, subject: str, timeout: float) -> list[str]:
        """Answers of all ranks to an action of ``held_report.py``."""
        body = {"action": f"{action} {subject}", **_TARGET}
        answer = await self._call(url, "/weights_checker", timeout, body)
        reply = decode_json(answer, _CheckReply, f"{url}/weights_checker")
        return [rank.checksums.get(action, "") for rank in reply.ranks]

    async def _call(
        self,
        url: str,
        path: str,
        timeout: float,
        body: Mapping[str, object] | None = None,
        key: Mapping[str, str] | None = None,
    ) -> bytes:
        """GET ``path``, or POST ``body`` to it. Something that changes the server takes the admin key, which is the
        default for a POST.
        """
        await self._turns.turn()
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        if key is None:
            key = self._http.as_client if body is None else self._http.as_admin
        try:
            async with (
                asyncio.timeout(timeout),
                self._http.session.request(method, url + path, data=data, headers={**_HEADERS, **key}) as response,
            ):
                answer = await response.read()
        except TimeoutError:
            raise EngineTimeoutError(f"{method} {url}{path}: no answer within {timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{method} {url}{path}: {error!r}") from error
        if response.status != 200:
            text = answer.decode(errors="replace")[:ERROR_TEXT]
            refusal = RequestRejectedError if response.status == 400 else EngineError
            raise refusal(f"{method} {url}{path}: expected 200, found {response.status}: {text}")
        return answer
