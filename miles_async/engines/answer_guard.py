"""Check what an inference server generated against what it was asked."""

from __future__ import annotations

from miles_async.arguments.routing import RouterShape
from miles_async.errors import ConfigurationError, TransientEngineError
from miles_async.types import GenerateRequest, Generation, RoutedExperts


def check_answer(answer: Generation, request: GenerateRequest, vocabulary: int | None, url: str) -> None:
    """Raise TransientEngineError unless the answer is one to this request.

    ``vocabulary``: number of token ids of the model; None where it is not known.
    """
    tokens, most = answer.output_ids, request.sampling.get("max_new_tokens")
    if most is not None and len(tokens) > most:
        raise TransientEngineError(f"{url}: expected at most {most} tokens (max_new_tokens), found {len(tokens)}")
    if not len(tokens):
        return
    if tokens.min() < 0 or (vocabulary is not None and tokens.max() >= vocabulary):
        last = "" if vocabulary is None else f" to {vocabulary - 1}, those of config.json"
        raise TransientEngineError(f"{url}: expected token ids from 0{last}, found {tokens.min()} to {tokens.max()}")


def experts_of(answer: Generation, request: GenerateRequest, routers: RouterShape, url: str) -> RoutedExperts | None:
    """Return the experts of an answer by token, see ``Generation``; None if the request was aborted before it began.

    Raises:
        ConfigurationError: the server reports none.
        TransientEngineError: they are not those of all tokens and layers, or no experts of the model.
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
