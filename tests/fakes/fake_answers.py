"""Requests and answers of a ``FakeEngine``."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from miles_async.engines.sglang.answers import EventPacker
from tests.json_dict import JsonDict


@dataclass
class Running:
    """One request in flight."""

    body: JsonDict
    request_id: str
    cached_tokens: int = 0
    spans: list[JsonDict] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    aborted: bool = False
    retractions: int = 0

    @property
    def cache_key(self) -> tuple[object, ...]:
        return (self.body.get("extra_key"), *self.prompt)

    @property
    def prompt(self) -> list[int]:
        tokens: list[int] = self.body["input_ids"]
        return tokens

    @property
    def room(self) -> int:
        """Tokens that it may generate."""
        most: int = self.body["sampling_params"].get("max_new_tokens", 128)
        return most

    @property
    def finished(self) -> bool:
        return self.aborted or len(self.output) >= self.room

    def say(self, token: int, version: str) -> None:
        """Append a token that weights of this version sampled."""
        position = len(self.output)
        self.output.append(token)
        if self.spans and self.spans[-1]["version"] == version:
            self.spans[-1]["end"] = position + 1
        else:
            self.spans.append({"version": version, "start": position, "end": position + 1})

    def reply(self, version: str, *, canary_shift: float, tells_experts: bool) -> JsonDict:
        """The plain answer so far, as if it were the last one."""
        body, prompt = self.body, self.prompt
        meta: JsonDict = {
            "id": self.request_id,
            "finish_reason": {"type": "abort" if self.aborted else "length", "length": len(self.output)},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(self.output),
            "cached_tokens": self.cached_tokens,
            "weight_version": version,
            "weight_versions": self.spans or [{"version": version, "start": 0, "end": 0}],
            "num_retractions": self.retractions,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in self.output]
        if body.get("return_routed_experts") and tells_experts:
            read = [*prompt, *self.output][body["routed_experts_start_len"] : -1]
            meta["routed_experts"] = b64encode(np.repeat(np.array(read, np.int32), 2)).decode()
        if (start := body.get("logprob_start_len", -1)) >= 0:
            shifted = [[-1.0 + canary_shift, token, None] for token in prompt[start + 1 :]]
            meta["input_token_logprobs"] = [[None, prompt[start], None], *shifted]
        return {"text": "", "output_ids": self.output, "meta_info": meta}


def event_writer(pack_answer: Callable[[object], bytes | None] | None) -> Callable[[JsonDict], bytes]:
    """Return what makes events of a stream's replies. ``pack_answer``: packs the last of them, if they are packed."""
    packer = None if pack_answer is None else EventPacker(pack_answer)

    def write(reply: JsonDict) -> bytes:
        return b"data: " + json.dumps(reply if packer is None else packer(reply)).encode() + b"\n\n"

    return write
