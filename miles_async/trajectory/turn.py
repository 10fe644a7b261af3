"""One turn of the model: a generation call that continues when a publication aborts it (partial rollouts).

Sampled tokens are kept and the request continues under the new version. Every chunk has its own version spans, so the
weights of each token are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from miles_async.api import EngineClient
from miles_async.errors import TransientEngineError
from miles_async.seams.streams import OnTokens, StreamingClient
from miles_async.trajectory.constraints import GRAMMAR
from miles_async.types import GenerateRequest, Generation, RoutedExperts

MAX_EMPTY_CHUNKS = 8  # aborts in a row without a token after which the engine counts as broken


async def take_turn(
    client: EngineClient,
    request: GenerateRequest,
    *,
    kept: Callable[[int], None] = lambda version: None,
    on_tokens: OnTokens | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Generation:
    """Sample until the model stops or ``max_new_tokens`` of the request are there.

    The text, if the request asks for it, covers the whole turn. A token keeps the experts of the first pass that read
    it, since the log-probs of later tokens come from that pass. ``kept`` receives the version of every chunk's first
    token. ``on_tokens`` gets the turn's tokens while they are sampled, if the client streams, and after each call.
    ``decode``: finds stop texts (``stop`` of the sampling parameters) that begin before an abort and end after it;
    engines miss these.

    A turn under a grammar starts again instead of continuing: a grammar applies from the first token of a request.
    Raises what the client raises, and TransientEngineError for an engine that only aborts.
    """
    begin, constrained = len(request.input_ids), GRAMMAR in request.sampling
    request = replace(request, text_from=begin)
    chunks: list[Generation] = []
    empty = 0
    while True:
        at = len(request.input_ids) - begin
        chunk = await _generate(client, request, at, on_tokens)
        if at and decode is not None and (stops := request.sampling.get("stop")):
            chunk = _until_stop(chunk, request.input_ids[begin:].tolist(), stops, decode)
        aborted = chunk.finish_reason == "abort"
        thrown_away = aborted and constrained
        keeps = 0 if thrown_away else len(chunk.output_ids)
        if on_tokens is not None:
            on_tokens(at, chunk.output_ids[:keeps].tolist())
        if not thrown_away:
            chunks.append(chunk)
        if keeps:
            kept(int(chunk.weight_versions[0]))
        budget = request.sampling["max_new_tokens"] - keeps
        if not aborted or budget <= 0:
            return _joined(chunks, constrained)
        empty = 0 if keeps else empty + 1
        if empty >= MAX_EMPTY_CHUNKS:
            raise TransientEngineError(f"{chunk.engines[0]} aborted {empty} times without a token that can be kept")
        if not thrown_away:
            request = replace(
                request,
                input_ids=np.concatenate([request.input_ids, chunk.output_ids]),
                sampling={**request.sampling, "max_new_tokens": budget},
                experts_from=request.experts_from + (0 if chunk.routed_experts is None else len(chunk.routed_experts)),
            )


async def _generate(client: EngineClient, request: GenerateRequest, at: int, on_tokens: OnTokens | None) -> Generation:
    """``at``: position of the call's first token in the turn."""
    if on_tokens is None or not isinstance(client, StreamingClient):
        return await client.generate(request)
    return await client.stream(request, lambda first, token_ids: on_tokens(at + first, token_ids))


def _until_stop(
    chunk: Generation, before: list[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Generation:
    """End ``chunk`` with the first token that completes a stop text begun in ``before``, the turn's earlier tokens."""
    longest = max(len(stop.encode()) for stop in stops)  # a token is a byte at least
    ids = chunk.output_ids.tolist()
    for count in range(1, min(longest, len(ids)) + 1):
        text = decode([*before[-longest:], *ids[:count]])
        if any(stop in text for stop in stops):
            cut, experts = len(ids) - count, chunk.routed_experts
            return replace(
                chunk,
                output_ids=chunk.output_ids[:count],
                logprobs=chunk.logprobs[:count],
                weight_versions=chunk.weight_versions[:count],
                routed_experts=None if experts is None else experts[: len(experts) - cut],
                finish_reason="stop",
                text=None if cut else chunk.text,
            )
    return chunk


def _joined(chunks: Sequence[Generation], constrained: bool) -> Generation:
    finish_reason = chunks[-1].finish_reason
    experts = [chunk.routed_experts for chunk in chunks if chunk.routed_experts is not None]
    return Generation(
        output_ids=np.concatenate([chunk.output_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        weight_versions=np.concatenate([chunk.weight_versions for chunk in chunks]),
        finish_reason="length" if finish_reason == "abort" else finish_reason,
        engines=tuple(dict.fromkeys(engine for chunk in chunks for engine in chunk.engines)),
        chunks=len(chunks),
        prompt_tokens=sum(chunk.prompt_tokens for chunk in chunks),
        cached_tokens=sum(chunk.cached_tokens for chunk in chunks),
        text=chunks[-1].text,
        routed_experts=np.concatenate(experts) if experts else None,
        constrained=constrained,
        started_at=chunks[0].started_at,
        finished_at=chunks[-1].finished_at,
    )


def with_last_token(experts: RoutedExperts | None) -> RoutedExperts | None:
    """Append a row of 0 for the token after the last one with experts."""
    return None if experts is None else np.pad(experts, ((0, 1), (0, 0)))
