"""Replayed choices of experts: drives Megatron's ``RouterReplay`` (0.19) around every forward pass.

Every router has one. It records what the router chooses, or chooses in its place; the weights of the chosen experts,
and through them gradients, are the router's own either way. Layers whose activations are recomputed run a second time
in the backward pass, when other micro-batches may have gone forward. ``RouterReplay`` has a queue for that, since the
micro-batches of a module go backward in the order in which they went forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn import Module

from miles_async.errors import ContractViolation
from miles_async.types import Int64, RoutedExperts

Experts = Mapping[int, Tensor]
"""Layer of the model, from 0 → experts of this rank's positions, uint8 or int16 [n, top-k], in the host's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingLayout:
    """The experts that a rank needs where choices are replayed."""

    layers: tuple[int, ...]  # of this rank that have routers, by their numbers in the model, from 0
    topk: int
    experts: int  # of each layer
    share: int  # ranks that split each context-parallel rank's positions by sequence parallelism
    share_rank: int  # this one of them


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a module that can be replayed: it must be built with ``moe_enable_routing_replay``."""

    replays: Mapping[int, RouterReplay]  # by layer of the whole model, from 0
    recomputed: bool  # they run again in the backward pass

    @classmethod
    def of(cls, module: Module) -> Routers:
        found: list[Any] = [part for part in module.modules() if getattr(part, "router_replay", None) is not None]
        config = get_model_config(module)
        whole = config.recompute_granularity == "full"
        selected = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
        return cls({part.layer_number - 1: part.router_replay for part in found}, whole or selected)

    @contextmanager
    def choosing(
        self, experts: Experts | None, record: dict[int, Tensor] | None, device: torch.device
    ) -> Iterator[None]:
        """Around a forward pass: choose ``experts``, or let routers choose; then add their choices to ``record``, if it
        is given. After a pass with gradients, recomputed layers choose ``experts`` again.
        """
        for layer, replay in self.replays.items():
            if experts is not None:
                replay.set_target_indices(experts[layer].to(device).long())
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            elif record is not None:
                replay.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        for layer, replay in self.replays.items():
            if record is not None:
                record[layer] = replay.get_recorded_indices().to(torch.int16).cpu()
            if not (self.recomputed and torch.is_grad_enabled()):
                replay.clear_indices()
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD if experts is not None else None)

    def forget(self) -> None:
        """Let routers choose for themselves again."""
        for replay in self.replays.values():
            replay.clear_indices()
            replay.clear_router_replay_action()


def replayed_experts(experts: RoutedExperts, token_at: Int64, layout: RoutingLayout) -> Experts:
    """Lay out the experts of tokens as this rank's routers see these tokens.

    Args:
        experts: [N, layers of the model × top-k].
        token_at: [T / CP], the token at each position of this context-parallel rank; -1 for padding and for last
        tokens, whose experts no engine reports and nothing needs: these get all experts in turn.
        layout: of this rank.

    Raises:
        ContractViolation: a token has the same expert twice in a layer.
    """
    size = len(token_at) // layout.share
    own = token_at[layout.share_rank * size : (layout.share_rank + 1) * size]
    free = np.flatnonzero(own < 0)
    in_turn = (np.arange(len(free) * layout.topk) % layout.experts).reshape(len(free), layout.topk)
    result: dict[int, Tensor] = {}
    for layer in layout.layers:
        chosen = np.zeros((size, layout.topk), experts.dtype)
        chosen[own >= 0] = experts[own[own >= 0], layer * layout.topk : (layer + 1) * layout.topk]
        chosen[free] = in_turn
        if any((chosen[:, i] == chosen[:, j]).any() for i, j in combinations(range(layout.topk), 2)):
            raise ContractViolation(
                f"--use-rollout-routing-replay: expected {layout.topk} different experts of every token in layer "
                f"{layer}, found one twice: the engines report other layers than the model has, or none"
            )
        result[layer] = torch.from_numpy(chosen)
    return result
