"""An EngineClient that says what it is told to, token by token, and remembers what it was asked to continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from miles_async.seams.streams import OnTokens
from miles_async.types import GenerateRequest, Generation, Picture

Script = Callable[[int, list[int]], Sequence[int] | Exception]
"""(number of the call, input ids) → what is said."""


class ScriptedModel:
    """Log-prob of the n-th token of a call: -(n + 1) / 10; "experts" of a token: its id and the number of the call.
    ``aborts``: calls that end after that many tokens. Streams tell tokens one by one. ``holds``: numbers of
    tokens after which they wait for an event; ``restarts``: tokens that calls tell first, and take back.
    """

    def __init__(self, script: Script, *, version: int = 0, seconds: float = 0.0) -> None:
        self.script = script
        self.version = version
        self.seconds = seconds
        self.aborts: dict[int, int] = {}
        self.holds: dict[int, asyncio.Event] = {}
        self.restarts: dict[int, list[int]] = {}
        self.given_up = 0  # streams that ended before they were over
        self.requests: list[list[int]] = []
        self.said: list[list[int]] = []
        self.sampling: list[dict[str, object]] = []
        self.routing_keys: list[str] = []
        self.pictures: list[tuple[Picture, ...]] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        call = len(self.requests)
        input_ids = request.input_ids.tolist()
        self.requests.append(input_ids)
        self.sampling.append(dict(request.sampling))
        self.routing_keys.append(request.routing_key)
        self.pictures.append(request.pictures)
        await asyncio.sleep(self.seconds)
        said = self.script(call, input_ids)
        if isinstance(said, Exception):
            raise said
        room = request.sampling["max_new_tokens"]
        finish = "stop" if len(said) <= room else "length"
        output = np.array(said[:room], np.int32)
        if call in self.aborts:
            output, finish = output[: self.aborts[call]], "abort"
        self.said.append(output.tolist())
        read = [*input_ids, *output.tolist()][request.experts_from : -1]
        return Generation(
            output_ids=output,
            logprobs=-(np.arange(len(output), dtype=np.float32) + 1) / 10,
            weight_versions=np.full(len(output), self.version, np.int32),
            finish_reason=finish,  # type: ignore[arg-type]
            engines=("engine-0",),
            cached_tokens=len(request.input_ids) // 2,
            prompt_tokens=len(request.input_ids),
            routed_experts=np.array([(token, call) for token in read]).astype(np.int16).reshape(-1, 2),
        )

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> Generation:
        call = len(self.requests)
        generation = await self.generate(request)
        try:
            if call in self.restarts:
                await self._tell(self.restarts[call], on_tokens)
                on_tokens(0, ())
            await self._tell(generation.output_ids.tolist(), on_tokens)
        except BaseException:
            self.given_up += 1
            raise
        return generation

    async def _tell(self, token_ids: Sequence[int], on_tokens: OnTokens) -> None:
        for at, token in enumerate(token_ids):
            on_tokens(at, [token])
            if (held := self.holds.get(at + 1)) is not None:
                await held.wait()
