"""Samples of a micro-batch share the positions of common prefixes in the model (``--share-prefixes``).

Causal attention never looks from a token at what follows, so keys, values and hidden states of a prefix are the same in
all samples that begin with it: it passes through the model once, and gradients of all samples add up there. A chat
template is shared by all samples, a prompt by its group's samples, and parts of responses by similar samples.

Megatron's layers see one sequence of T positions. Two parts have to know better: attention gathers every sample from
its positions, and the rotary embedding turns each position by its place in its sample. For the host's layers only:
Transformer Engine's attention takes whole sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Module

from miles_async.errors import ConfigurationError


@dataclass(kw_only=True)
class SharedPrefixes(PackedSeqParams):
    """One sequence of T positions, and the samples of M tokens that are in it."""

    samples: Tensor  # int32 [S + 1]: boundaries of the samples in [0, M]
    places: Tensor  # int64 [M]: position of each token, in [0, T)
    own: Tensor  # int64 [S]: tokens at the end of each sample that share no position with an earlier one


def check_module(module: Module) -> None:
    """Raises ConfigurationError unless the model has a plain rotary embedding."""
    model: Any = unwrap_model(module)
    rotary = getattr(model, "rotary_pos_emb", None)
    if type(rotary) is not RotaryEmbedding or model.config.multi_latent_attention:
        raise ConfigurationError(
            f"--share-prefixes: expected a model with a plain rotary embedding, found {type(rotary).__name__}"
            f"{' and latent attention' if model.config.multi_latent_attention else ''}; leave it out"
        )


@contextlib.contextmanager
def rotary_positions(module: Module, attention: PackedSeqParams, positions: Tensor) -> Iterator[None]:
    """Have the model's rotary embedding answer for ``positions``, [T], instead of 0 to T - 1 if prefixes are shared."""
    if not isinstance(attention, SharedPrefixes):
        yield
        return
    model: Any = unwrap_model(module)
    hook = model.rotary_pos_emb.register_forward_hook(lambda _module, _arguments, angles: angles[positions])
    try:
        yield
    finally:
        hook.remove()
