"""Convert ``--megatron-X`` for Megatron's configs: names of dtypes and enumerations become their values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.transformer.enums import AttnBackend

from miles_async.arguments.megatron_fields import FieldValue, megatron_fields
from miles_async.arguments.megatron_settings import Values
from miles_async.backends.megatron.attention_kernels import usable_backend
from miles_async.backends.megatron.host import IGNORED_ON_CPU
from miles_async.backends.megatron.platform import Platform

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,  # as Megatron's own command line has it
}


def config_values(settings: Values, platform: Platform) -> dict[str, object]:
    """Field → value of one config, without fields that the platform ignores."""
    return {
        name: _object(name, value)
        for name, value in settings.items()
        if platform.device == "cuda" or name not in IGNORED_ON_CPU
    }


def optimizer_values(settings: Values, platform: Platform) -> dict[str, object]:
    """As :func:`config_values`; ``--optimizer-cpu-offload`` alone offloads all of the state, as on Megatron's command
    line; the config's default is none. Main weights are whole by default, since checkpoints can't hold remainders.
    """
    values = {"store_param_remainders": False, **config_values(settings, platform)}
    if values.get("optimizer_cpu_offload"):
        values.setdefault("optimizer_offload_fraction", 1.0)
    return values


def _object(name: str, value: FieldValue | list[FieldValue]) -> object:
    if name == "attention_backend":
        return AttnBackend[usable_backend(str(value))]
    kind = megatron_fields()[name].type
    return DTYPES[str(value)] if kind is not None and "dtype" in kind.kinds and value is not None else value
