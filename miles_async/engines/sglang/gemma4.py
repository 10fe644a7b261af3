"""In the server's process: what SGLang (0.5.23) lacks for Gemma 4's text model alone, on every device.

It knows the sizes of the heads of both kinds of layers in configs that hold encoders, too, and fails with the text
model's own. It multiplies a router's norm and scale once, at the first request, so that a scale published later has no
effect. And it fills a layer's factor in a way that cannot be followed to its tensor.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from miles_async.engines.sglang.hooks import hook

_PARSE = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"
_LOAD = "sglang.srt.models.gemma4_causal.Gemma4ForCausalLM.load_weights"


def register() -> None:
    """Patch what reads a config, and models created from now on."""
    hook(_PARSE, _read_text_config)
    hook(_LOAD, load)


def _read_text_config(parse: Any, *args: Any, **kwargs: Any) -> Any:
    know_text_config()
    return parse(*args, **kwargs)


@cache
def know_text_config() -> None:
    """Have transformers make text configs as SGLang reads them: with one size of heads per kind of layer."""
    from sglang.srt.utils.hf_transformers.config import _apply_gemma4_attention_overrides
    from transformers import AutoConfig
    from transformers import Gemma4TextConfig as Plain

    class Gemma4TextConfig(Plain):  # transformers knows its tokenizer by this name
        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            _apply_gemma4_attention_overrides(SimpleNamespace(text_config=self))
            if self.enable_moe_block:
                self.num_experts_per_tok = self.top_k_experts  # as the record of routed experts reads it

    AutoConfig.register("gemma4_text", Gemma4TextConfig, exist_ok=True)


def load(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``load_weights`` of a model, after which it computes with what it was given."""
    for name, buffer in model.named_buffers():
        if name.endswith(".layer_scalar"):
            buffer.weight_loader = copy
    result = original(model, *args, **kwargs)
    for module in model.modules():
        if hasattr(module, "fuse_scale"):
            module.fuse_scale()  # in place: captured graphs read the same memory
    return result


def copy(buffer: Tensor, given: Tensor) -> None:
    """Load a buffer by a copy, which can be followed."""
    buffer.data.copy_(given)
