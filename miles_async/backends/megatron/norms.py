"""Norm layers without Transformer Engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient ``finalize_model_grads`` sums over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return super().forward(x)
        # In fp32, as Transformer Engine and transformers do: 1 + w has few bits left for w in bfloat16.
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class HeadsNorm(RMSNorm):
    """RMSNorm over all heads of queries or keys together (OLMoE); a tensor-parallel rank has a part of the heads.

    The weight is whole on every rank: ``finalize_model_grads`` sums the gradients of layers of these names.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, width / TP] → the same shape."""
        group = parallel_state.get_tensor_model_parallel_group()
        own = self.weight.unflatten(0, (group.size(), -1))[group.rank()]
        squares = reduce_from_tensor_model_parallel_region(x.float().square().sum(-1, keepdim=True), group=group)
        # Every rank's values depend on the sum, so gradients are summed over ranks, too.
        mean = copy_to_tensor_model_parallel_region(squares, group=group) / len(self.weight)
        return (x * torch.rsqrt(mean + self.eps)).to(x.dtype) * own


class QueryHeadsNorm(HeadsNorm):
    """HeadsNorm of queries whose heads are a separate axis (MiniMax-M2)."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float = 1e-5, **_: object) -> None:
        """``hidden_size``: of one head."""
        super().__init__(config, hidden_size * self.heads(config), eps)

    @staticmethod
    def heads(config: TransformerConfig) -> int:
        """Number of heads on all ranks."""
        return config.num_attention_heads

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads / TP, head size] → the same shape."""
        return super().forward(x.flatten(-2)).view_as(x)


class KeyHeadsNorm(QueryHeadsNorm):
    """The same for keys."""

    @staticmethod
    def heads(config: TransformerConfig) -> int:
        return config.num_query_groups or config.num_attention_heads


class GateNorm(RMSNorm):
    """RMSNorm of each head of a gated delta net, whose weight is not centred at zero, as the model's other norms' are.

    Its weight is whole on every tensor-parallel rank, which has a part of the heads. ``finalize_model_grads`` sums the
    gradients under sequence parallelism only.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        self.zero_centered = False
        self.partial = config.tensor_model_parallel_size > 1 and not config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[heads · tokens, head size] → the same shape."""
        weight = self.weight
        if self.partial:
            weight = copy_to_tensor_model_parallel_region(
                weight, group=parallel_state.get_tensor_model_parallel_group()
            )
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)
