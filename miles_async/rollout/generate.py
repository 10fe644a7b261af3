"""Single-turn generation: one prompt in, one sample out, whatever happens to the weights in between.

A generation that a publication aborts keeps its tokens and goes on under the new version (partial rollout);
every chunk brings its own version spans, so each token still knows which weights produced it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from arguments.rollout import RolloutArguments
from miles_async.errors import TransientEngineError
from miles_async.protocols import EngineClient
from miles_async.staleness.versions import versions_per_token
from miles_async.types import NO_VERSION, Attempt, Generation, Prompt, Sample

MAX_EMPTY_CHUNKS = 8  # aborts in a row without a token before we say that the engine does not work


def sampling_parameters(arguments: RolloutArguments) -> dict[str, Any]:
    """SGLang's sampling parameters of training rollouts."""
    sampling: dict[str, Any] = {
        "temperature": arguments.rollout_temperature,
        "top_p": arguments.rollout_top_p,
        "top_k": arguments.rollout_top_k,
        "max_new_tokens": arguments.rollout_max_response_len,
    }
    if arguments.rollout_stop:
        sampling["stop"] = list(arguments.rollout_stop)
    return sampling


class SingleTurnGenerate:
    """The default Generate."""

    def __init__(self, sampling: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> None:
        """``sampling``: SGLang sampling parameters with ``max_new_tokens``; ``decode``: token ids → text."""
        self._sampling = dict(sampling)
        self._decode = decode

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample:
        """Raises what the client raises, and TransientEngineError for an engine that only aborts."""
        prompt = attempt.prompt
        input_ids = list(prompt.token_ids)
        budget = self._sampling["max_new_tokens"]
        chunks: list[Generation] = []
        empty = 0
        while True:
            chunk = await client.generate(
                input_ids,
                {**self._sampling, "max_new_tokens": budget},
                # A key per sample, the same for all its chunks. One per group would share the prompt's prefix cache
                # on one engine, but whole groups spread unevenly: a quarter more step time in simulation.
                routing_key=f"{attempt.attempt_id}-{sample_index}",
            )
            chunks.append(chunk)
            budget -= len(chunk.output_ids)
            if chunk.finish_reason != "abort" or budget <= 0:
                break
            input_ids += chunk.output_ids.tolist()
            empty = 0 if len(chunk.output_ids) else empty + 1
            if empty >= MAX_EMPTY_CHUNKS:
                raise TransientEngineError(f"{chunk.engine_id} aborted {empty} times without a token")
        return build_sample(prompt, chunks, self._decode)


def build_sample(prompt: Prompt, chunks: Sequence[Generation], decode: Callable[[Sequence[int]], str]) -> Sample:
    """Prompt and chunks → one sample whose arrays are aligned with prompt + response tokens."""
    response = np.concatenate([chunk.output_ids for chunk in chunks])
    versions = np.concatenate([versions_per_token(chunk.spans, len(chunk.output_ids)) for chunk in chunks])
    start, length = len(prompt.token_ids), len(prompt.token_ids) + len(response)
    loss_mask = np.zeros(length, np.uint8)
    loss_mask[start:] = 1
    logprobs = np.zeros(length, np.float32)
    logprobs[start:] = np.concatenate([chunk.logprobs for chunk in chunks])
    weight_versions = np.full(length, NO_VERSION, np.int32)
    weight_versions[start:] = versions
    finish_reason = chunks[-1].finish_reason
    return Sample(
        tokens=np.concatenate([np.asarray(prompt.token_ids, np.int32), response]),
        prompt_length=start,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        weight_versions=weight_versions,
        text=decode(response.tolist()),
        finish_reason="length" if finish_reason == "abort" else finish_reason,
        metadata={"engines": list(dict.fromkeys(chunk.engine_id for chunk in chunks)), "chunks": len(chunks)},
    )
