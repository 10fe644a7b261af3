"""One simulated engine server: SGLang's HTTP protocol as ``engines/`` speaks it, without a model.

A bounded number of requests runs at once, the rest queue. A response is a number of tokens that is drawn when its
first chunk arrives; a token's id says how many tokens follow it, so that what continues an aborted response knows how
much is left. Between events nothing happens: progress is computed when a pause, an abort or the end asks for it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec

from miles_async.engines.sglang.answers import MEDIA_TYPE, TEXT_FROM, pack
from miles_async.engines.sglang.held_report import FINGERPRINT_ACTION, fingerprint, write_report
from miles_async.simulation.network import Response
from miles_async.simulation.recording import EventLog
from miles_async.simulation.settings import FaultAction, SimulationSettings
from miles_async.types import HeldPart, HeldWeights, JsonObject

TENSORS = ("t0", "t1")  # of all weights
PROMPT_TOKEN = 0
OUTPUT_LOGPROB = -0.5
DECODER_ID = 1
END_OF_TURN = "<end>"
_GENERATE = ("/generate", "/health_generate")
_OK = msgspec.json.encode({"success": True, "message": "ok"})


def canary_logprobs(version: int, tokens: int) -> tuple[float, ...]:
    """Log-probs of a canary under ``version``, different for neighbouring versions."""
    return (-1.0 - 0.5 * (version % 7),) * (tokens - 1)


def simulated_text(tokens: int) -> str:
    """Text of a response, as long as a language model's."""
    return "word" * (tokens - 1) + END_OF_TURN


def simulated_digest(version: int) -> str:
    """Digest of each tensor of ``version``."""
    return f"{version:016x}"


def held_weights(version: int) -> HeldWeights:
    """Answer of an engine that holds ``version`` about the tensors of SimulatedTrainer."""
    part = HeldPart(offset=0, shape=(1,), strides=(1,), dtype="float32", digest=simulated_digest(version))
    return HeldWeights(parts={name: (part,) for name in TENSORS})


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    prompt_tokens: int
    remaining: int  # tokens of the response that are not generated yet
    budget: int  # tokens this call may still generate
    answer: asyncio.Future[str]  # finish reason
    progress: float = 0.0  # part of the next token that is done
    started: float = 0.0
    timer: asyncio.TimerHandle | None = None
    output: list[int] = field(default_factory=list)
    spans: list[dict[str, str | int]] = field(default_factory=list)


@dataclass(slots=True)
class Meter:
    """Counters over all engines and their restarts."""

    generated_tokens: int = 0
    slot_seconds: float = 0.0  # slots × seconds of generating
    drawn_seconds: float = 0.0
    drawn: Counter[int] = field(default_factory=Counter)  # tokens → responses that were begun


class SimulatedEngine:
    """A host of the network, from its start to its death."""

    def __init__(
        self,
        index: int,
        url: str,
        settings: SimulationSettings,
        *,
        chance: random.Random,
        meter: Meter,
        log: EventLog,
        fault: Callable[[str], FaultAction | None],
    ) -> None:
        """``fault``: path → what a call of it meets, or None."""
        self.name = f"engine-{index}"
        self.url = url
        self.weight_version = "default"
        self.corrupt = False
        self._slots = settings.slots
        self._response_seconds = settings.response_seconds
        self._drawn_token_seconds = settings.token_seconds
        self._token_seconds = settings.token_seconds * settings.slowness.get(index, 1.0)
        self._chance = chance
        self._meter = meter
        self._log = log
        self._fault = fault
        now = asyncio.get_running_loop().time()
        self._silences = [s for s in settings.faults.silences if s.engine == index and s.at_seconds >= now]
        self._running: dict[str, _Request] = {}
        self._queue: deque[_Request] = deque()
        self._paused: str | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._dead = asyncio.get_running_loop().create_future()  # why it ended

    # ------------------------------------------------------------------------------------------- life
    @property
    def load(self) -> int:
        """Requests that run or queue."""
        return len(self._running) + len(self._queue)

    def _scheduler_load(self) -> dict[str, float]:
        """A slot is all the KV cache that a request needs."""
        running = len(self._running)
        return {"num_running_reqs": running, "num_waiting_reqs": len(self._queue), "token_usage": running / self._slots}

    async def wait_exit(self) -> str:
        return await asyncio.shield(self._dead)

    def die(self, why: str) -> None:
        """Cut every connection; the generated tokens are lost."""
        if self._dead.done():
            return
        self._log.add("engine-died", engine=self.name, why=why.replace(" ", "-"), requests=self.load)
        self._dead.set_result(why)
        for request in (*self._running.values(), *self._queue):
            if request.request_id in self._running and self._paused is None:
                self._advance(request)
            if not request.answer.done():
                request.answer.set_exception(aiohttp.ServerDisconnectedError())
        self._running.clear()
        self._queue.clear()
        self._resumed.set()

    async def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        match self._fault(path):
            case "crash":
                self.die(f"crashed at {path}")
            case "refuse":
                return Response(b"refused", status=500)
            case "hang":
                await self.wait_exit()
            case "corrupt":
                self.corrupt = True
        await self._heard(path)
        response = await self._answer(path, body)
        await self._heard(path)
        return response

    async def _heard(self, path: str) -> None:
        """Wait for the end of a silence. Raises ServerDisconnectedError if the engine dies in it."""
        for silence in self._silences:
            left = silence.at_seconds + silence.seconds - asyncio.get_running_loop().time()
            if 0 < left <= silence.seconds and (path in _GENERATE or not silence.only_tokens):
                await asyncio.wait([self._dead], timeout=left)
        self._check_alive()

    async def _answer(self, path: str, body: bytes) -> Response:
        if path == "/generate":
            return await self._generate(msgspec.json.decode(body))
        if path == "/server_info":
            return Response(msgspec.json.encode({"speculative_algorithm": None}))
        if path == "/model_info":
            return Response(msgspec.json.encode({"weight_version": self.weight_version}))
        if path == "/health_generate":
            return await self._make_progress()
        if path == "/v1/loads":
            return Response(msgspec.json.encode({"loads": [self._scheduler_load()]}))
        if path == "/weights_checker":
            return self._check_weights(msgspec.json.decode(body)["action"])
        handler = _HANDLERS.get(path)
        if handler is not None:
            handler(self, msgspec.json.decode(body))
        return Response(_OK)

    async def _make_progress(self) -> Response:
        """Flush the cache as SGLang does: retry every second, for 20 s."""
        for _ in range(20):
            await asyncio.sleep(1.0)
            self._check_alive()
            if self._paused is None:
                return Response(_OK)
        return Response(b"", status=503)

    def _check_alive(self) -> None:
        if self._dead.done():
            raise aiohttp.ServerDisconnectedError()

    # ------------------------------------------------------------------------------------- generation
    async def _generate(self, body: JsonObject) -> Response:
        if body.get("logprob_start_len") == 0:
            return await self._score(body["input_ids"])
        request = self._request(body)
        self._queue.append(request)
        self._fill_slots()
        finish_reason = await request.answer
        meta = {
            "finish_reason": {"type": finish_reason},
            "prompt_tokens": request.prompt_tokens,
            "weight_version": self.weight_version,
            "weight_versions": request.spans or None,
            "output_token_logprobs": [(OUTPUT_LOGPROB, token, None) for token in request.output],
        }
        text = None
        if finish_reason != "abort":
            text = simulated_text(len(request.output) + len(body["input_ids"]) - body[TEXT_FROM])
        packed = pack({"output_ids": request.output, "meta_info": meta}, text)
        assert packed is not None
        return Response(packed, headers={"Content-Type": MEDIA_TYPE, "x-smg-routed-worker-id": self.url})

    def _request(self, body: JsonObject) -> _Request:
        tokens = body["input_ids"]
        remaining = tokens[-1]
        if remaining == PROMPT_TOKEN:  # the first chunk of a response; else the last token encodes the rest
            seconds = self._response_seconds.draw(self._chance)
            remaining = max(1, round(seconds / self._drawn_token_seconds))
            self._meter.drawn_seconds += remaining * self._drawn_token_seconds
            self._meter.drawn[remaining] += 1
        return _Request(
            request_id=body["rid"],
            prompt_tokens=len(tokens),
            remaining=remaining,
            budget=body["sampling_params"]["max_new_tokens"],
            answer=asyncio.get_running_loop().create_future(),
        )

    def _check_weights(self, action: str) -> Response:
        name = action.split()[0]
        report = write_report(held_weights(int(self.weight_version) + self.corrupt))
        answer = fingerprint(report) if name == FINGERPRINT_ACTION else report
        return Response(msgspec.json.encode({"ranks": [{"checksums": {name: answer}}]}))

    async def _score(self, tokens: list[int]) -> Response:
        while self._paused is not None:
            await self._resumed.wait()
        self._check_alive()
        version = int(self.weight_version) if self.weight_version.isdigit() else 0
        scores = canary_logprobs(version + self.corrupt, len(tokens))
        entries = [(None, tokens[0], None), *((score, 0, None) for score in scores)]
        meta = {"weight_version": self.weight_version, "input_token_logprobs": entries}
        return Response(msgspec.json.encode({"meta_info": meta}))

    def _fill_slots(self) -> None:
        if self._paused is not None:
            return
        while self._queue and len(self._running) < self._slots:
            request = self._queue.popleft()
            self._running[request.request_id] = request
            self._start(request)

    def _start(self, request: _Request) -> None:
        loop = asyncio.get_running_loop()
        tokens = min(request.remaining, request.budget)
        request.started = loop.time()
        request.timer = loop.call_later((tokens - request.progress) * self._token_seconds, self._finish, request)

    def _finish(self, request: _Request) -> None:
        self._advance(request, tokens=min(request.remaining, request.budget))
        self._end(request, "length" if request.remaining else "stop")

    def _advance(self, request: _Request, tokens: int | None = None) -> None:
        """Account for tokens generated since the request was last started: ``tokens``, or by the clock."""
        assert request.timer is not None
        request.timer.cancel()
        seconds = asyncio.get_running_loop().time() - request.started
        if tokens is None:
            done = request.progress + seconds / self._token_seconds
            # Less than its due: at its end the timer says so, and an abort just before leaves a token.
            tokens = min(int(done + 1e-9), request.remaining - 1, request.budget - 1)
            request.progress = max(0.0, min(1.0, done - tokens))
        first = len(request.output)
        request.output.extend(range(request.remaining - 1, request.remaining - 1 - tokens, -1))
        request.remaining -= tokens
        request.budget -= tokens
        self._meter.generated_tokens += tokens
        self._meter.slot_seconds += seconds
        if tokens:
            span: dict[str, str | int] = {"version": self.weight_version, "start": first, "end": first + tokens}
            if request.spans and request.spans[-1]["version"] == self.weight_version:
                request.spans[-1]["end"] = first + tokens
            else:
                request.spans.append(span)

    def _end(self, request: _Request, finish_reason: str) -> None:
        self._running.pop(request.request_id, None)
        self._log.add("answer", engine=self.name, tokens=len(request.output), reason=finish_reason)
        if not request.answer.done():  # cancelled: nothing waits for it
            request.answer.set_result(finish_reason)
        self._fill_slots()

    # ------------------------------------------------------------------------------- pauses and weights
    def _pause(self, body: JsonObject) -> None:
        if self._paused is not None:
            return
        for request in self._running.values():
            self._advance(request)
            if body["mode"] == "retract":
                request.progress = 0.0  # the token that was being computed is lost with its KV cache
        self._paused = body["mode"]
        self._resumed.clear()
        self._log.add("engine-paused", engine=self.name, requests=self.load)
        if self._paused == "abort":
            self._abort({"abort_all": True})

    def _continue(self, body: JsonObject) -> None:
        if self._paused is None:
            return
        self._paused = None
        self._resumed.set()
        self._log.add("engine-continued", engine=self.name, requests=self.load)
        for request in self._running.values():
            self._start(request)
        self._fill_slots()

    def _abort(self, body: JsonObject) -> None:
        everything = body.get("abort_all", False)
        requests = [r for r in (*self._running.values(), *self._queue) if everything or r.request_id == body["rid"]]
        chosen = {request.request_id for request in requests}
        self._queue = deque(request for request in self._queue if request.request_id not in chosen)
        for request in requests:
            if request.request_id in self._running and self._paused is None:
                self._advance(request)
            self._end(request, "abort")

    def _update(self, body: JsonObject) -> None:
        if self.weight_version != body["weight_version"]:
            self._log.add("engine-updated", engine=self.name, version=body["weight_version"])
        self.weight_version = body["weight_version"]


_HANDLERS: Mapping[str, Callable[[SimulatedEngine, JsonObject], None]] = {
    "/pause_generation": SimulatedEngine._pause,
    "/continue_generation": SimulatedEngine._continue,
    "/abort_request": SimulatedEngine._abort,
    "/update_weights_from_distributed": SimulatedEngine._update,
}
