"""Checks of flags and environment for Transformer Engine's attention kernels. Light to import.

Samples are packed, so attention gets sequences end to end (``qkv_format`` thd). For these, Transformer Engine (2.10,
2.11) has cuDNN's fused kernel in bf16 from Hopper on, flash-attn in bf16 where that package is installed, and else its
unfused attention, which takes memory by the square of the longest sample
(pytorch/attention/dot_product_attention/utils.py, common/fused_attn/fused_attn.cpp).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping

from packaging.version import Version

SWITCHES: Mapping[str, Mapping[str, str]] = {
    backend: dict(zip(("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"), values, strict=True))
    for backend, values in {"flash": "100", "fused": "010", "unfused": "001", "local": "000", "auto": "111"}.items()
}
"""Megatron's ``attention_backend`` → variables that megatron-core (0.19) sets; it asserts that none has another value
(``LanguageModule._set_attention_backend``).
"""

FLASH_VERSIONS = Version("2.1.1"), Version("2.8.3")
"""Oldest and newest flash-attn that Transformer Engine (2.10, 2.11) takes; on Blackwell the oldest is 2.7.3."""

FLASH_3 = "flash-attn-3"  # any version; flash-attn-4, which SGLang needs, doesn't count

FLASH_NOTE = (
    f"--megatron-attention-backend flash: neither flash-attn {FLASH_VERSIONS[0]} to {FLASH_VERSIONS[1]} nor {FLASH_3} "
    "is installed, so Transformer Engine chooses (auto): cuDNN's fused attention from Hopper on; on older GPUs unfused "
    "attention, which takes memory by the square of the longest sample"
)


def usable_backend(named: str) -> str:
    """Return ``named``, or "auto" unless the flash-attn that it names is installed, as Transformer Engine takes it
    (pytorch/attention/.../backends.py).
    """
    oldest, newest = FLASH_VERSIONS
    second = _version("flash-attn")
    has_flash = (second is not None and oldest <= second <= newest) or _version(FLASH_3) is not None
    return "auto" if named == "flash" and not has_flash else named


def _version(package: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def attention_problems(backend: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield why ranks would fail at a ``usable_backend``; ``environment``: theirs."""
    wrong = {
        name: environment[name] for name, value in SWITCHES[backend].items() if environment.get(name, value) != value
    }
    if wrong:
        found = ", ".join(f"{name}={value}" for name, value in wrong.items())
        yield (
            f"{found} in the environment: Megatron sets it by --megatron-attention-backend, which is {backend}: unset "
            f"it, and choose by that flag ({', '.join(SWITCHES)})"
        )


FP32_NOTE = (
    "fp32 on GPUs: Transformer Engine's fused attention takes bf16 only, and what it has for fp32 takes memory by the "
    "square of the longest sample; --bf16 is the default there"
)
