"""Check the experts that an inference server says it chose."""

from __future__ import annotations

from miles_async.arguments.routing import RouterShape
from miles_async.errors import ConfigurationError, TransientEngineError
from miles_async.types import GenerateRequest, RoutedExperts, ServerAnswer


def experts_of(answer: ServerAnswer, request: GenerateRequest, routers: RouterShape, url: str) -> RoutedExperts | None:
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
