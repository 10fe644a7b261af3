"""Checkpoints with float8 matrices, each block with a scale (DeepSeek-V3, Kimi-K2, Qwen3's FP8 ones), read as floats.

Bridges of two families know such files and the others would drop the scales, so the tensors are multiplied where they
are read from the files: model, export and the check of names never see that they were quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_async.types import JsonObject

if TYPE_CHECKING:
    import torch
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
    from torch import Tensor

SCALES = "_scale_inv"  # at the end of the name of a tensor's scales


def is_readable(quantization: JsonObject) -> bool:
    """True if checkpoints with this ``quantization_config`` are read."""
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    return method == "fp8" and isinstance(block, list) and len(block) == 2


def read_as_floats(source: SafeTensorsStateSource, quantization: JsonObject, dtype: torch.dtype) -> None:
    """Have ``source`` return ``dtype`` for tensors with scales, and hide the scales."""
    files, load = source.key_to_filename_map, source.load_tensors
    block = quantization["weight_block_size"]

    def load_tensors(names: list[str]) -> dict[str, Tensor]:
        scales = [name + SCALES for name in names if name + SCALES in files]
        source._key_to_filename_map_cache = files
        try:
            found = load([*names, *scales])
        finally:
            source._key_to_filename_map_cache = plain
        for name in scales:
            quantized = name.removesuffix(SCALES)
            found[quantized] = dequantized(found[quantized], found.pop(name), block).to(dtype)
        return found

    plain = {name: file for name, file in files.items() if not name.endswith(SCALES)}
    source._key_to_filename_map_cache, source._keys_cache = plain, None
    source.load_tensors = load_tensors  # type: ignore[method-assign]


def dequantized(values: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """fp32 [M, N] of float8 [M, N] and a scale per block of ``block`` rows and columns."""
    scales = scales.float()
    for dimension, size in enumerate(block):
        scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, values.shape[dimension])
    return values.float() * scales
