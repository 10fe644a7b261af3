"""A quantization for SGLang, as its plugin: ``--quantization rounded`` keeps linear layers as int8.

SGLang's own quantizations need kernels of GPUs. This one, in plain torch, makes a server on CPU one whose weights are
right only if every update restores layers before it loads and post-processes them after: floats that are loaded into
int8 lose what is behind the point, and floats that stay floats are not rounded. Nothing raises; log-probs tell.

Imported in the server's processes alone, by the entry point that ``conftest.py`` declares.
"""

from __future__ import annotations

import torch
from sglang.srt.arg_groups.choices import add_quantization_method_choices
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import CPU_QUANTIZATION_METHODS, QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn


class RoundedLinearMethod(LinearMethodBase):
    """``weight`` · ``weight_scale`` at all times: floats and ones while loading, then int8 and a scale per row.

    ``weight`` stays the same parameter, with its loader; only its data changes.
    """

    def create_weights(self, layer: nn.Module, *sizes: object, **attributes: object) -> None:
        UnquantizedLinearMethod().create_weights(layer, *sizes, **attributes)
        layer.register_buffer("weight_scale", torch.ones_like(layer.weight[:, :1]))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight.data
        layer.weight_scale = weight.abs().amax(dim=1, keepdim=True) / 127
        layer.weight.data = (weight / layer.weight_scale).round().to(torch.int8)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """What is not loaded now, when only a part is, rounds to what it was."""
        layer.weight.data = layer.weight.data * layer.weight_scale
        layer.weight_scale = torch.ones_like(layer.weight_scale)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight * layer.weight_scale, bias)


class RoundedConfig(QuantizationConfig):
    """Rounds linear layers; embeddings, the output layer, norms and fused experts are no LinearBase."""

    @classmethod
    def from_config(cls, config: dict[str, object]) -> RoundedConfig:
        return cls()

    def get_name(self) -> str:
        return "rounded"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        return RoundedLinearMethod() if isinstance(layer, LinearBase) else None

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_scaled_act_names(self) -> list[str]:
        return []


def register() -> None:
    """Makes ``--quantization rounded`` known to this process."""
    add_quantization_method_choices(["rounded"])
    QUANTIZATION_METHODS["rounded"] = CPU_QUANTIZATION_METHODS["rounded"] = RoundedConfig
