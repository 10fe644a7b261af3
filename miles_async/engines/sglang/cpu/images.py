"""In the server's process, on a CPU: what SGLang (0.5.23) and transformers (5.19) lack there for models with images.

Without torchvision, transformers has image processors of its own, but no processor of videos, and so no processor of
any model that could read a video. SGLang compiles the rotation of patches, which takes a C++ compiler and minutes.
"""

from __future__ import annotations

from typing import Any

_ROTATION = "sglang.srt.layers.attention.vision.apply_rotary_pos_emb"


def register() -> None:
    """Patch processors and models created from now on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils.import_utils import is_torchvision_available

    HookRegistry.register(_ROTATION, _rotated, HookType.REPLACE)
    if not is_torchvision_available():
        ProcessorMixin.get_attributes = classmethod(_without_videos(ProcessorMixin.get_attributes.__func__))


def _rotated(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_pos_emb_native_eager

    return apply_rotary_pos_emb_native_eager(*args, **kwargs)


def _without_videos(names: Any) -> Any:
    return lambda cls: [name for name in names(cls) if name != "video_processor"]
