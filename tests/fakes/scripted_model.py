"""An EngineClient that says what it is told to, token by token, and remembers what it was asked to continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from miles_async.types import GenerateRequest, Generation

Script = Callable[[int, list[int]], Sequence[int] | Exception]
"""(number of the call, input ids) → what is said."""


class ScriptedModel:
    """Log-prob of the n-th token of a call: -(n + 1) / 10; "experts" of a token: its id and the number of the call.
    ``aborts``: calls that end after that many tokens.
    """

    def __init__(self, script: Script, *, version: int = 0, seconds: float = 0.0) -> None:
        self.script = script
        self.version = version
        self.seconds = seconds
        self.aborts: dict[int, int] = {}
        self.requests: list[list[int]] = []
        self.sampling: list[dict[str, object]] = []
        self.routing_keys: list[str] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        call = len(self.requests)
        input_ids = request.input_ids.tolist()
        self.requests.append(input_ids)
        self.sampling.append(dict(request.sampling))
        self.routing_keys.append(request.routing_key)
        await asyncio.sleep(self.seconds)
        said = self.script(call, input_ids)
        if isinstance(said, Exception):
            raise said
        room = request.sampling["max_new_tokens"]
        finish = "stop" if len(said) <= room else "length"
        output = np.array(said[:room], np.int32)
        if call in self.aborts:
            output, finish = output[: self.aborts[call]], "abort"
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
