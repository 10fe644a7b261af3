"""Sizes of a mixture's routers, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miles_async.arguments.model import EXPERT_COUNTS
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterShape:
    """Choices that a mixture makes for one token: ``topk`` of ``experts`` in each of ``layers``.

    Layers without a router count too, as inference servers count them; what is said of their experts means nothing.
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
    experts = next((config[name] for name in EXPERT_COUNTS if config.get(name)), 0)
    if not experts:
        return None
    layers, topk = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
    if layers is None or topk is None:
        raise ConfigurationError(
            "config.json of --hf-checkpoint: expected num_hidden_layers and num_experts_per_tok, found "
            f"{layers} and {topk}"
        )
    return RouterShape(layers=layers, topk=topk, experts=experts)
