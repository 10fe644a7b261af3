"""An SGLang server in this process, without a model: the protocol of 0.5.23 as the engines package uses it.

Held to the real one by tests/integration/test_engines_real.py. A "token" takes ``token_seconds``; the n-th
output token of a request has id ``n % 50 + 3`` and log-prob ``-0.5``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from miles_async.engines.sglang import STREAM
from miles_async.engines.sglang.answers import DECODER, MEDIA_TYPE, PACK, TEXT_FROM, pack
from miles_async.engines.sglang.held_report import FINGERPRINT_ACTION, REPORT_ACTION, fingerprint, write_report
from miles_async.engines.sglang.scores import PACK_SCORES, pack_scores
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.tls import Tls
from miles_async.types import HeldWeights
from tests.fakes.fake_answers import Running, event_writer
from tests.json_dict import JsonDict

KV_TOKENS = 16_384  # that fit into the cache


@dataclass
class FakeEngine:
    """Start with ``async with``; ``url`` is then where it listens. Fields may be changed while it runs."""

    token_seconds: float = 0.001
    name_worker: bool = True  # answer as through the router: with the header that names the engine
    respond: Callable[[JsonDict], web.Response | None] = lambda body: None  # misbehave instead of generating
    transform: Callable[[JsonDict], JsonDict] = lambda reply: reply  # spoil the answer
    packs: bool = True  # answers are packed where requests ask for it; an engine that is not ours knows nothing of it
    decoder: int | None = 7  # fingerprint of its tokenizer
    tells_experts: bool = True  # where requests ask for them: one layer, twice the number of the token
    weight_version: str = "default"
    server_info: JsonDict = field(default_factory=lambda: {"speculative_algorithm": None})
    requests: list[JsonDict] = field(default_factory=list)  # bodies of /generate
    headers: list[dict[str, str]] = field(default_factory=list)  # and their headers
    peers: set[object] = field(default_factory=set)  # and the connections that they came over
    calls: list[str] = field(default_factory=list)  # paths of everything else, in order
    aborted_ids: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # names of the files of the last update from disk
    held: list[HeldWeights] = field(default_factory=list)  # by rank
    reports_otherwise: list[HeldWeights] = field(default_factory=list)  # what it says it holds, if not that
    checks: list[str] = field(default_factory=list)  # actions of /weights_checker
    tls: Tls | None = None

    def __post_init__(self) -> None:
        self.url = ""
        self.stuck = False  # it generates nothing
        self.silent: set[str] = set()  # paths that it never answers
        self.canary_shift = 0.0  # added to the log-probs of /generate with logprob_start_len
        self._running: dict[str, Running] = {}
        self._waiting = 0  # requests that came during a pause
        self._paused: str | None = None
        self._released: list[str] = []  # kinds of memory
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._updating = False
        self._groups: set[str] = set()
        self._cache: set[tuple[object, ...]] = set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeEngine:
        app = web.Application(middlewares=[self._record])
        app.add_routes(
            [
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/health_generate", self._make_progress),
                web.get("/v1/loads", self._loads),
                web.get("/v1/models", self._models),
                web.get("/ready", self._ready),
                web.get("/health", self._healthy),
                web.post("/generate", self._generate),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._flush_cache),
                web.post("/release_memory_occupation", self._release_memory),
                web.post("/resume_memory_occupation", self._retake_memory),
                web.post("/abort_request", self._abort),
                web.post("/update_weight_version", self._update_weight_version),
                web.post("/init_weights_update_group", self._init_group),
                web.post("/destroy_weights_update_group", self._destroy_group),
                web.post("/begin_weight_update", self._begin),
                web.post("/end_weight_update", self._end),
                web.post("/update_weights_from_distributed", self._update),
                web.post("/update_weights_from_disk", self._load_files),
                web.post("/weights_checker", self._check_weights),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        context = None if self.tls is None else self.tls.server()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        self.url = Network(tls=self.tls).url("127.0.0.1", self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Close the socket and every connection, as a killed process does."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for running in self._running.values():
                running.aborted = True
            self._resumed.set()
            await runner.cleanup()

    @property
    def running(self) -> int:
        return len(self._running)

    @web.middleware
    async def _record(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/generate":
            self.headers.append(dict(request.headers))
            self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        elif request.method == "POST":
            self.calls.append(request.path)
        if request.path in self.silent:
            await asyncio.Event().wait()
        return await handler(request)

    # ------------------------------------------------------------------------------------- information
    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "fake",
                "served_model_name": "fake",
                "tokenizer_path": "fake",
                "is_generation": True,
                "weight_version": self.weight_version,
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.server_info)

    async def _loads(self, request: web.Request) -> web.Response:
        tokens = sum(len(running.prompt) + len(running.output) for running in self._running.values())
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": self._waiting,
            "token_usage": min(1.0, tokens / KV_TOKENS),
        }
        return web.json_response({"loads": [load]})

    async def _make_progress(self, request: web.Request) -> web.Response:
        await self._resumed.wait()
        return web.Response(status=503 if self.stuck else 200)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._paused else 200)

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response()

    # -------------------------------------------------------------------------------------- generation
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if (response := self.respond(body)) is not None:
            return response
        if not body.get("input_ids"):
            return self._refusal("no input", body)
        if len(body["input_ids"]) > KV_TOKENS:
            return self._refusal("the input is longer than the context", body)
        self._waiting += 1
        await self._resumed.wait()
        self._waiting -= 1
        running = self._begin_request(body)
        try:
            if body.get("stream"):
                return await self._stream(request, running)
            await self._run(running, running.room)
        finally:
            del self._running[running.request_id]
        return self._response(self.transform(self._reply(running)), body)

    def _begin_request(self, body: JsonDict) -> Running:
        request_id = body.get("rid") or f"fake-{len(self.requests)}"
        running = self._running[request_id] = Running(body, request_id)
        if running.cache_key in self._cache:
            running.cached_tokens = len(running.prompt) - 1
        return running

    async def _stream(self, request: web.Request, running: Running) -> web.StreamResponse:
        """One event per token, each with the whole answer so far."""
        response = web.StreamResponse(headers={**self._names(), "Content-Type": "text/event-stream"})
        await response.prepare(request)
        packed = self.packs and running.body.get(PACK)
        write = event_writer((lambda reply: self._packed(reply, running.body)) if packed else None)
        while not running.finished:
            reply = self._reply(running)
            reply["meta_info"]["finish_reason"] = None
            await response.write(write(reply))
            await self._run(running, len(running.output) + 1)
        if self._runner is None and request.transport is not None:  # it died
            request.transport.abort()
            return response
        await response.write(write(self.transform(self._reply(running))))
        await asyncio.sleep(self.token_seconds)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _response(self, reply: JsonDict, body: JsonDict) -> web.Response:
        packed = None
        if body.get(PACK):
            packed = self._packed(reply, body)
        elif body.get(PACK_SCORES):
            packed = pack_scores(reply)
        if self.packs and packed is not None:
            return web.Response(body=packed, content_type=MEDIA_TYPE, headers=self._names())
        return web.json_response(reply, headers=self._names())

    def _refusal(self, message: str, body: JsonDict) -> web.Response:
        error = {"error": {"message": message, "code": 400}}
        if not body.get("stream"):
            return web.json_response(error, status=400)
        events = event_writer(None)(error) + b"data: [DONE]\n\n"
        return web.Response(body=events, content_type="text/event-stream", headers=self._names())

    def _packed(self, reply: JsonDict, body: JsonDict) -> bytes | None:
        aborted = reply["meta_info"]["finish_reason"]["type"] == "abort"
        return pack(reply, None if aborted or DECODER not in body else self._text(body, reply))

    def _text(self, body: JsonDict, reply: JsonDict) -> str | None:
        """Every token in brackets."""
        tokens = [*body["input_ids"][body[TEXT_FROM] :], *reply["output_ids"]]
        return "".join(f"<{token}>" for token in tokens) if body[DECODER] == self.decoder else None

    def _names(self) -> dict[str, str]:
        return {"x-smg-routed-worker-id": self.url} if self.name_worker else {}

    def _reply(self, running: Running) -> JsonDict:
        self._cache.add(running.cache_key)
        return running.reply(self.weight_version, canary_shift=self.canary_shift, tells_experts=self.tells_experts)

    async def _run(self, running: Running, max_new_tokens: int) -> None:
        while len(running.output) < max_new_tokens and not running.aborted:
            await asyncio.sleep(self.token_seconds)
            if self._paused in ("retract", "in_place"):
                await self._resumed.wait()
            if running.aborted:
                return
            assert not self._released, "it generates without memory"
            running.say(len(running.output) % 50 + 3, self.weight_version)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body.get("abort_all"):
            self.aborted_ids.append(body["rid"])
        for request_id, running in self._running.items():
            if body.get("abort_all") or request_id == body["rid"]:
                running.aborted = True
        return web.Response()

    # ------------------------------------------------------------------------------------------ pauses
    async def _pause(self, request: web.Request) -> web.Response:
        self._paused = (await request.json())["mode"]
        self._resumed.clear()
        for running in self._running.values():
            if self._paused == "abort":
                running.aborted = True
            elif self._paused == "retract":
                running.retractions += 1
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self._paused = None
        self._resumed.set()
        return web.json_response({"status": "ok"})

    async def _release_memory(self, request: web.Request) -> web.Response:
        assert self._paused == "retract" or not self._running, "SGLang's scheduler dies of that"
        self._released += (await request.json())["tags"]
        self._cache.clear()
        return web.Response()

    async def _retake_memory(self, request: web.Request) -> web.Response:
        for tag in (await request.json())["tags"]:
            self._released.remove(tag)
        return web.Response()

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if not self._flushed():
            return web.Response(status=400, text="Flush cache failed: requests are running")
        return web.Response(text="Cache flushed.")

    def _flushed(self) -> bool:
        if self._running and self._paused != "retract":
            return False
        self._cache.clear()
        return True

    # ----------------------------------------------------------------------------------------- weights
    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _init_group(self, request: web.Request) -> web.Response:
        self._groups.add((await request.json())["group_name"])
        return _outcome(None)

    async def _destroy_group(self, request: web.Request) -> web.Response:
        name = (await request.json())["group_name"]
        if name not in self._groups:
            return _outcome("The group to be destroyed does not exist.")
        self._groups.discard(name)
        return _outcome(None)

    async def _begin(self, request: web.Request) -> web.Response:
        if self._updating:
            return _outcome("a weight-update session is already open")
        self._updating = True
        return _outcome(None)

    async def _end(self, request: web.Request) -> web.Response:
        self._updating = False
        return _outcome(None)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        streams = body["load_format"] == STREAM
        if self._updating is streams:
            return _outcome("must (streams: must not) run between begin_weight_update() and end_weight_update()")
        if not self._groups.issuperset(body["group_name"].split()):
            return _outcome("Failed to receive weights: no such group")
        return self._taken(body)

    async def _load_files(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.loaded = sorted(path.name for path in _files_in(body["model_path"]))
        if not self.loaded:
            return _outcome("Failed to get weights iterator: Repo id must be in the form 'repo_name'")
        return self._taken(body)

    def _taken(self, body: JsonDict) -> web.Response:
        self.weight_version = body["weight_version"]
        if body.get("flush_cache", True) and not self._flushed():
            return _outcome("Weights were updated, but the cache was not flushed because requests are still running")
        return _outcome(None)

    async def _check_weights(self, request: web.Request) -> web.Response:
        action = (await request.json())["action"].split()[0]
        self.checks.append(action)
        told = self.reports_otherwise if action == REPORT_ACTION and self.reports_otherwise else self.held
        reports = [write_report(held) for held in told]
        answers = [fingerprint(report) if action == FINGERPRINT_ACTION else report for report in reports]
        ranks = [{"checksums": {action: answer}} for answer in answers]
        return web.json_response({"success": True, "ranks": ranks})


def _files_in(directory: str) -> Iterable[Path]:
    return Path(directory).glob("*.safetensors")


def _outcome(failure: str | None) -> web.Response:
    return web.json_response({"success": failure is None, "message": failure or "ok"}, status=400 if failure else 200)
