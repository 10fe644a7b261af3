"""Single-turn generation: one prompt in, one sample out, whatever happens to the weights in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from miles_async.api import EngineClient
from miles_async.arguments.rollout import RolloutArguments
from miles_async.trajectory.turn import take_turn, with_last_token
from miles_async.types import NO_VERSION, Attempt, Generation, JsonObject, Prompt, Sample

Began = Callable[[str, int], None]
"""``staleness.oldest_versions.OldestVersions.note``: (routing key, version of a token that carries loss)."""


def routing_key(attempt: Attempt, sample_index: int) -> str:
    """One per sample, the same for all its requests, so that they find their prefix in the cache of one engine.

    One per group would share the prompt's cache, too, but whole groups spread unevenly: a quarter more step time in
    simulation.
    """
    return f"{attempt.attempt_id}-{sample_index}"


def sampling_parameters(arguments: RolloutArguments) -> dict[str, object]:
    """SGLang's sampling parameters of training rollouts."""
    sampling: dict[str, object] = {
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

    def __init__(
        self,
        sampling: JsonObject,
        decode: Callable[[Sequence[int]], str],
        *,
        began: Began = lambda key, version: None,
    ) -> None:
        """``sampling``: SGLang sampling parameters with ``max_new_tokens``; ``decode``: token ids → text."""
        self._sampling = dict(sampling)
        self._decode = decode
        self._began = began

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample:
        """Raises what the client raises, and TransientEngineError for an engine that only aborts."""
        prompt = attempt.prompt
        key = routing_key(attempt, sample_index)
        kept = partial(self._began, key)
        input_ids = np.array(prompt.token_ids, np.int32)
        turn = await take_turn(client, input_ids, self._sampling, routing_key=key, kept=kept)
        return build_sample(prompt, turn, self._decode)


def build_sample(prompt: Prompt, turn: Generation, decode: Callable[[Sequence[int]], str]) -> Sample:
    """Prompt and answer → one sample whose arrays are aligned with prompt + response tokens."""
    start, length = len(prompt.token_ids), len(prompt.token_ids) + len(turn.output_ids)
    loss_mask = np.zeros(length, np.uint8)
    loss_mask[start:] = 1
    logprobs = np.zeros(length, np.float32)
    logprobs[start:] = turn.logprobs
    weight_versions = np.full(length, NO_VERSION, np.int32)
    weight_versions[start:] = turn.weight_versions
    return Sample(
        tokens=np.concatenate([np.asarray(prompt.token_ids, np.int32), turn.output_ids]),
        prompt_length=start,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        weight_versions=weight_versions,
        routed_experts=with_last_token(turn.routed_experts),
        text=decode(turn.output_ids.tolist()),
        finish_reason=turn.finish_reason,
        metadata={
            "engines": list(turn.engines),
            "chunks": turn.chunks,
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
        },
    )
