"""Check an inference server's answer against its request."""

from __future__ import annotations

import numpy as np

from miles_async.arguments.routing import RouterShape
from miles_async.errors import ConfigurationError, TransientEngineError
from miles_async.types import HIGHEST_LOGPROB, GenerateRequest, Generation, JsonObject, RoutedExperts

LEAST_ECHO_LOGPROB = -30.0  # below: less than one sound answer in 10^13 is one that begins with its whole input


def check_answer(answer: Generation, request: GenerateRequest, vocabulary: int | None, url: str) -> None:
    """Raise TransientEngineError unless the answer is one to this request.

    ``vocabulary``: number of token ids of the model; None where it is unknown.
    """
    tokens, most = answer.output_ids, request.sampling.get("max_new_tokens")
    if most is not None and len(tokens) > most:
        raise TransientEngineError(f"{url}: expected at most {most} tokens (max_new_tokens), found {len(tokens)}")
    if not len(tokens):
        if answer.finish_reason == "stop":  # "length" may mean a full context
            raise TransientEngineError(f"{url}: expected a token that ends the answer, found none")
        return
    if tokens.min() < 0 or (vocabulary is not None and tokens.max() >= vocabulary):
        last = "" if vocabulary is None else f" to {vocabulary - 1}, those of config.json"
        raise TransientEngineError(f"{url}: expected token ids from 0{last}, found {tokens.min()} to {tokens.max()}")
    if (highest := answer.logprobs.max()) > HIGHEST_LOGPROB:
        raise TransientEngineError(f"{url}: expected log-probs of at most 0, found {highest:g}")
    given = len(request.input_ids)
    if answer.prompt_tokens and answer.prompt_tokens != given:
        raise TransientEngineError(f"{url}: expected an answer to {given} tokens, found one to {answer.prompt_tokens}")
    if _is_echo(answer, request):
        raise TransientEngineError(
            f"{url}: expected an answer, found one that begins with its own input ({given} tokens), which its "
            "log-probs make next to impossible"
        )


def _is_echo(answer: Generation, request: GenerateRequest) -> bool:
    """Return whether the engine put the input in front of what it sampled.

    A model may repeat its input, too. The input is fixed before the engine samples, so exp(sum of the log-probs) is the
    chance that a sound engine's answer begins with it: near 1 for a model that copies.
    """
    given = len(request.input_ids)
    if given > len(answer.output_ids) or _narrowed(request.sampling):
        return False
    if not np.array_equal(answer.output_ids[:given], request.input_ids):
        return False
    return bool(answer.logprobs[:given].sum(dtype=np.float64) < LEAST_ECHO_LOGPROB)


def _narrowed(sampling: JsonObject) -> bool:
    """Return whether tokens are sampled from a part of the distribution: log-probs say nothing about chances then."""
    top_p, top_k, min_p = sampling.get("top_p", 1.0), sampling.get("top_k", -1), sampling.get("min_p", 0.0)
    return sampling.get("temperature", 1.0) == 0 or top_p < 1 or top_k > 0 or min_p > 0


def experts_of(answer: Generation, request: GenerateRequest, routers: RouterShape, url: str) -> RoutedExperts | None:
    """Return the experts of an answer by token, see ``Generation``; None if the request was aborted before it began.

    Raises:
        ConfigurationError: the server reports none.
        TransientEngineError: they don't cover all tokens and layers, or name experts that the model lacks.
    """
    generated = len(answer.output_ids)
    if not generated and answer.finish_reason == "abort":
        return None
    experts = answer.routed_experts
    if experts is None:
        raise ConfigurationError(
            f"{url}: expected the experts of each token (--use-rollout-routing-replay), found none: start this engine "
            "with --enable-return-routed-experts, or leave out --use-rollout-routing-replay"
        )
    tokens = len(request.input_ids) + generated - 1 - request.experts_from
    if len(experts) != tokens * routers.width:
        raise TransientEngineError(
            f"{url}: expected {routers.topk} experts in each of {routers.layers} layers for {tokens} tokens, found "
            f"{len(experts)} numbers"
        )
    if len(experts) and not (experts.min() >= 0 and experts.max() < routers.experts):
        raise TransientEngineError(
            f"{url}: expected experts from 0 to {routers.experts - 1}, found {experts.min()} to {experts.max()}"
        )
    compact: RoutedExperts = experts.astype(routers.dtype, copy=False)
    return compact.reshape(tokens, routers.width)
