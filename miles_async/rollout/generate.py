"""Single-turn generation: one prompt in, one sample out, whatever happens to the weights in between. Also checks
samples of any origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np

from miles_async.api import EngineClient
from miles_async.arguments.rollout import RolloutArguments
from miles_async.errors import TransientEngineError
from miles_async.staleness.versions import oldest_version
from miles_async.trajectory.rendering import Decoder, ImageFormat
from miles_async.trajectory.turn import take_turn, with_last_token
from miles_async.types import (
    HIGHEST_LOGPROB,
    NO_VERSION,
    Attempt,
    GenerateRequest,
    Generation,
    JsonObject,
    Prompt,
    Sample,
    TurnSpan,
)

_FEW_TOKENS = 512  # decoded faster than handed to a thread and back

LOWEST_LOGPROB = -1e4
"""No float32 softmax ends below -104. SGLang (0.5) reports the lowest float, -3.4e38, where the probability is 0."""

Began = Callable[[str, int], None]
"""``staleness.versions.OldestVersions.note``: (routing key, version of a token that carries loss)."""


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
        decoder: Decoder,
        *,
        began: Began = lambda key, version: None,
        images: ImageFormat | None = None,
    ) -> None:
        """``sampling``: SGLang sampling parameters with ``max_new_tokens``. ``images``: None for a model that reads
        none. A response ends at a placeholder: after it, engine and trainer would look for an image.
        """
        self._image_token = None if images is None else images.image_token
        ends = {} if images is None else {"stop_token_ids": sorted(images.placeholders)}
        self._sampling = {**sampling, **ends}
        self._decoder = decoder
        self._began = began

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample:
        """Raises what the client raises, and TransientEngineError for an engine that only aborts."""
        prompt = attempt.prompt
        key, decoder = routing_key(attempt, sample_index), self._decoder
        request = GenerateRequest(
            input_ids=np.array(prompt.token_ids, np.int32),
            sampling=self._sampling,
            routing_key=key,
            pictures=prompt.pictures,
            image_token=self._image_token,
            decoder_id=decoder.decoder_id,
        )
        turn = await take_turn(client, request, kept=partial(self._began, key), decode=decoder.decode)
        return build_sample(prompt, turn, await response_text(turn, decoder))


async def response_text(turn: Generation, decoder: Decoder) -> str:
    """Text of a turn as ``decoder.decode`` makes it: the engine's if it gave one, else decoded off the event loop."""
    if turn.text is not None:
        return decoder.trim(turn.text)
    output_ids = turn.output_ids.tolist()
    if len(output_ids) <= _FEW_TOKENS:
        return decoder.decode(output_ids)
    return await asyncio.to_thread(decoder.decode, output_ids)


def build_sample(prompt: Prompt, turn: Generation, text: str) -> Sample:
    """Prompt and answer → one sample whose arrays are aligned with prompt + response tokens.

    ``text``: of the response, see ``Sample``.
    """
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
        pictures=prompt.pictures,
        text=text,
        finish_reason=turn.finish_reason,
        metadata={
            "engines": list(turn.engines),
            "chunks": turn.chunks,
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
            "turn_spans": [[[*TurnSpan(start, length, False, turn.constrained, turn.started_at, turn.finished_at)]]],
        },
    )


def check_sample(sample: Sample) -> int:
    """Check the tokens that carry loss, over all branches, before a sample is rewarded (C1, C12). Return the oldest of
    their versions.

    Raises:
        VersionUnknownError: one has no weight version, or there is none.
        TransientEngineError: one has no usable log-prob; the numerics of the engine, or of a Generate, are broken.
    """
    oldest = oldest_version(sample)
    of_branches = [branch.rollout_logprobs[branch.loss_tokens()] for branch in sample.branches]
    logprobs = of_branches[0] if len(of_branches) == 1 else np.concatenate(of_branches)
    lowest, highest = np.minimum.reduce(logprobs), np.maximum.reduce(logprobs)
    if not (lowest >= LOWEST_LOGPROB and highest <= HIGHEST_LOGPROB):  # NaN is neither
        unusable = logprobs[~((logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB))]
        raise TransientEngineError(
            f"expected a log-prob, at most 0, of every token that carries loss, found {unusable[0]:g} "
            f"({len(unusable)} of {len(logprobs)} tokens): the numerics of the engine, or of a Generate, are broken"
        )
    return oldest
