"""Routers of mixtures: their sizes, from config.json, and the flags that agree with a replay of their choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from miles_async.arguments import Arguments
from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model import experts_per_token, num_experts
from miles_async.arguments.model_files import read_config
from miles_async.arguments.problems import given
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterShape:
    """Choices that a mixture makes for one token: ``topk`` of ``experts`` in each of ``layers``.

    Layers without a router count too, as inference servers count them; their reported experts are meaningless.
    """

    layers: int
    topk: int
    experts: int

    @property
    def width(self) -> int:
        """Experts of one token over all layers."""
        return self.layers * self.topk

    @property
    def dtype(self) -> type[np.uint8] | type[np.int16]:
        """The smallest that holds every expert's number."""
        return np.uint8 if self.experts <= 256 else np.int16


def router_shape(config: JsonObject) -> RouterShape | None:
    """None for a dense model. ``config``: config.json. Raises ConfigurationError if it lacks sizes."""
    experts = num_experts(config)
    if not experts:
        return None
    layers, topk = config.get("num_hidden_layers"), experts_per_token(config)
    if layers is None or topk is None:
        raise ConfigurationError(
            "config.json of --hf-checkpoint: expected num_hidden_layers and num_experts_per_tok, found "
            f"{layers} and {topk}"
        )
    return RouterShape(layers=layers, topk=topk, experts=experts)


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
    for other in given(unscored) if algorithm.routing_replay == "old_policy" else ():
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
