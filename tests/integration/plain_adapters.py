"""Reference of LoRA and DoRA, written plainly: explicit matrices beside the weights of a transformers model.

Shares no code with miles_async or megatron-bridge. Projections that Megatron computes as one layer share A.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
}
MLP = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
EXPERTS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}  # of all experts in one tensor each


@dataclass(frozen=True)
class PlainAdapters:
    rank: int
    alpha: float
    dora: bool

    def adapt(self, model: PreTrainedModel) -> None:
        """Freeze ``model`` and add adapters to all projections of it, or of its language model."""
        model.requires_grad_(False)
        for index, layer in enumerate(getattr(model.model, "language_model", model.model).layers):
            mlp = layer.mlp
            groups = [(layer.self_attn, ATTENTION, "")]
            if hasattr(mlp, "experts"):
                self._adapt_experts(mlp.experts, index)
                groups += [(mlp.shared_experts, MLP, "shared.")] if hasattr(mlp, "shared_experts") else []
            else:
                groups.append((mlp, MLP, ""))
            for module, names, prefix in groups:
                for name, parts in names.items():
                    self._adapt_group([getattr(module, part, None) for part in parts], f"{index}.{prefix}{name}")

    def _adapt_group(self, layers: list[torch.nn.Module], name: str) -> None:
        if None not in layers:
            shared = torch.nn.Parameter(first_matrix(name, self.rank, layers[0].in_features))
            for layer in layers:
                parametrize.register_parametrization(layer, "weight", _LowRank(layer.weight, shared, self))

    def _adapt_experts(self, experts: object, index: int) -> None:
        for name, parameter in EXPERTS.items():
            weight = getattr(experts, parameter)
            each = [
                first_matrix(f"{index}.experts.{expert}.{name}", self.rank, weight.shape[2])
                for expert in range(len(weight))
            ]
            first = torch.nn.Parameter(torch.stack(each))
            parametrize.register_parametrization(experts, parameter, _LowRank(weight, first, self))


class _LowRank(torch.nn.Module):
    """W + α/r · B·A, in rows of trained lengths with DoRA. With experts, matrices have a leading dimension."""

    def __init__(self, weight: torch.Tensor, first: torch.nn.Parameter, settings: PlainAdapters) -> None:
        super().__init__()
        self.first = first
        self.second = torch.nn.Parameter(weight.new_zeros(*weight.shape[:-1], settings.rank))
        self.lengths = torch.nn.Parameter(weight.norm(dim=-1)) if settings.dora else None
        self.scale = settings.alpha / settings.rank

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        total = weight + self.scale * self.second @ self.first
        if self.lengths is None:
            return total
        return total * (self.lengths / total.norm(dim=-1).detach())[..., None]


def first_matrix(name: str, rank: int, width: int) -> torch.Tensor:
    """A of the layer ``name``, in float64: any values will do, if both sides have them."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, width, generator=draw, dtype=torch.float64) / width**0.5


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that the adapted model computes with, under the names and in the forms of its files."""
    for name, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        for parameter in module.parametrizations:
            value = getattr(module, parameter).detach()
            if parameter == "weight":
                yield f"{name}.weight", value
            else:
                parts = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else ("down_proj",)
                for expert, tensor in enumerate(value):
                    for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
                        yield f"{name}.{expert}.{part}.weight", rows
