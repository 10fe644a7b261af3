"""Flags that replaying a mixture's choices of experts agrees with."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model_files import read_config
from miles_async.arguments.routing import router_shape
from miles_async.errors import ConfigurationError

UNREACHED = "moe_router_fusion"
"""The field of Megatron's config with which its routers are not asked one after another."""


def check_routing_replay(arguments: Arguments) -> Iterator[str]:
    """Check that the model has experts, and that some pass makes choices that can be replayed."""
    algorithm, directory = arguments.algorithm, arguments.model.hf_checkpoint
    if algorithm.routing_replay is None:
        return
    flag = "--use-rollout-routing-replay" if algorithm.use_rollout_routing_replay else "--use-routing-replay"
    config = read_config(directory) if directory else {}
    try:
        if config and router_shape(config) is None:
            yield f"{flag}: --hf-checkpoint {directory} is a dense model, which has no experts: leave it out"
    except ConfigurationError as error:
        yield f"{flag}: {error}"
    unscored = {
        "--use-rollout-logprobs": algorithm.use_rollout_logprobs,
        f"--prox-logp-method {algorithm.prox_logp_method}": algorithm.prox_logp_method != "recompute",
    }
    for other, given in unscored.items():
        if algorithm.routing_replay == "old_policy" and given:
            yield (
                f"{flag} with {other} has no effect: no pass of these weights computes old log-probs, whose choices of "
                "experts could be recorded; use --use-rollout-routing-replay, or leave one of them out"
            )
    try:
        provider = megatron_settings(arguments.model.megatron_extra).provider
    except ConfigurationError:
        return  # reported where they are read
    if provider.get(UNREACHED):
        yield f"--megatron-{UNREACHED.replace('_', '-')} passes over what {flag} replays: leave one of them out"
