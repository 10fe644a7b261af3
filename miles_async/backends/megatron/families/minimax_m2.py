"""MiniMax-M2 for megatron-bridge, whose norm of all heads (0.6) sums squares over ranks without a gradient."""

from __future__ import annotations

from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.minimax_m2 import minimax_m2_bridge, minimax_m2_provider

from miles_async.backends.megatron.norms import KeyHeadsNorm, QueryHeadsNorm


class MiniMaxM2Provider(GPTModelProvider):
    """Megatron's config of MiniMax-M2, by which ``host/spec.py`` knows it."""


def apply() -> None:
    """Give MiniMax-M2 norms whose gradients cross tensor-parallel ranks, with whole weights on each of these."""
    minimax_m2_provider.FullDimQNorm, minimax_m2_provider.FullDimKNorm = QueryHeadsNorm, KeyHeadsNorm
    minimax_m2_bridge._FullDimQKNormMapping = ReplicatedMapping
    minimax_m2_bridge.MiniMaxM2Bridge.PROVIDER_CLASS = MiniMaxM2Provider
