"""Conditions of Transformer Engine's attention kernels that flags and environment tell. Light to import.

Samples are packed, so attention gets sequences end to end (``qkv_format`` thd). For these, Transformer Engine (2.10,
2.11) has cuDNN's fused kernel in bf16 from Hopper on, flash-attn (version 2) in bf16 where that package is installed,
and else its unfused attention, which takes memory by the square of the longest sample
(pytorch/attention/dot_product_attention/utils.py, common/fused_attn/fused_attn.cpp).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping

SWITCHES: Mapping[str, Mapping[str, str]] = {
    backend: dict(zip(("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"), values, strict=True))
    for backend, values in {"flash": "100", "fused": "010", "unfused": "001", "local": "000", "auto": "111"}.items()
}
"""Megatron's ``attention_backend`` → variables that megatron-core (0.16) sets; it asserts that none has another value
(``LanguageModule._set_attention_backend``).
"""


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def attention_problems(
    backend: str, environment: Mapping[str, str], is_installed: Callable[[str], bool] = _is_installed
) -> Iterator[str]:
    """Yield why ranks would fail at ``--megatron-attention-backend``; ``environment``: theirs."""
    wrong = {
        name: environment[name] for name, value in SWITCHES[backend].items() if environment.get(name, value) != value
    }
    if wrong:
        found = ", ".join(f"{name}={value}" for name, value in wrong.items())
        yield (
            f"{found} in the environment: Megatron sets it by --megatron-attention-backend, which is {backend}: unset "
            f"it, and choose by that flag ({', '.join(SWITCHES)})"
        )
    if backend == "flash" and not (is_installed("flash_attn") or is_installed("flash_attn_interface")):
        yield (
            "--megatron-attention-backend flash: needs the package flash-attn, which is not installed; leave the flag "
            "out, and Transformer Engine takes cuDNN's fused attention from Hopper on"
        )


FP32_NOTE = (
    "fp32 on GPUs: Transformer Engine's fused attention takes bf16 only, and what it has for fp32 takes memory by the "
    "square of the longest sample; --bf16 is the default there"
)
