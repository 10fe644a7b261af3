"""Checkpoints with float8 matrices, each block with a scale (DeepSeek-V3, Kimi-K2, Qwen3's FP8 ones), read as floats.

Bridges of two families know such files and the others would drop the scales, so the tensors are multiplied where they
are read from the files: model, export and the check of names never see that they were quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.arguments.model_files import Shape, language_fields, read_header
from miles_async.errors import ConfigurationError
from miles_async.runtime.float8 import dequantized
from miles_async.types import JsonObject

if TYPE_CHECKING:
    import torch
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
    from torch import Tensor

SCALES = "_scale_inv"  # at the end of the name of a tensor's scales
_QUANTIZED = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "BF16", "F16", "F8_E8M0")  # in which scales are stored


def is_readable(quantization: JsonObject) -> bool:
    """True if checkpoints with this ``quantization_config`` are read."""
    block = quantization.get("weight_block_size")
    blocks = isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    dynamic = quantization.get("activation_scheme", "dynamic") == "dynamic"  # else files have activations' scales, too
    return quantization.get("quant_method") == "fp8" and blocks and dynamic


def check_files(config: JsonObject, directory: Path) -> None:
    """Raise ConfigurationError if float8 tensors of ``directory`` would be read with wrong scales, or without any.

    ``config``: config.json, which :func:`hf_config.check_model` accepted. Files that cannot be read are left out.
    """
    block = (language_fields(config).get("quantization_config") or {}).get("weight_block_size")
    tensors: dict[str, tuple[str, Shape]] = {}
    for file in directory.glob("*.safetensors"):
        try:
            tensors |= read_header(file)
        except (OSError, ValueError):
            return  # directory_problems names it
    if problems := list(_scale_problems(tensors, block)):
        shown = f"{problems[0]} (and {len(problems) - 1} more)" if len(problems) > 1 else problems[0]
        raise ConfigurationError(f"{directory}: {shown}: its values would be read wrongly; use another checkpoint")


def _scale_problems(tensors: Mapping[str, tuple[str, Shape]], block: list[int] | None) -> Iterator[str]:
    for name, (dtype, shape) in sorted(tensors.items()):
        scales = tensors.get(name + SCALES) if block else None
        if dtype in _QUANTIZED and scales is None:
            where = f"expected its scales in {name + SCALES}" if block else "config.json has no quantization_config"
            yield f"{name} is {dtype}, and {where}"
        elif scales is not None and dtype not in _QUANTIZED:
            yield f"{name} has scales and is {dtype}, expected {' or '.join(_QUANTIZED)}"
        elif scales is not None and block:
            blocks = tuple(-(-length // size) for length, size in zip(shape[-2:], block, strict=False))
            if scales[0] not in _FLOATS or scales[1] != shape[:-2] + blocks or len(shape) < 2:
                expected = f"floats {[*shape[:-2], *blocks]} by weight_block_size {block}"
                yield f"{name + SCALES} is {scales[0]} {list(scales[1])}, expected {expected}"
        elif name.endswith(SCALES) and name.removesuffix(SCALES) not in tensors:
            yield f"{name} has the scales of a tensor that no file has"


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
