"""Stand-ins for modules that megatron imports unconditionally, and fixes for their absence.

megatron-bridge 0.3 imports transformer_engine in its LoRA layers, megatron-core 0.16 triton in inference kernels. None
of it is used here: classes can be defined, but using one raises. An installed module gets no stand-in. A GPU machine
may lack them, too.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch

TRANSFORMER_ENGINE_USERS = ("megatron.bridge.peft.lora_layers", "megatron.bridge.peft.lora")
TRITON_USERS = (
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    "megatron.core.inference.contexts.fused_kv_append_kernel",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)


def stand_ins() -> dict[str, Callable[[], dict[str, types.ModuleType]]]:
    """Map each importing module to a function that makes the modules it lacks."""
    found: dict[str, Callable[[], dict[str, types.ModuleType]]] = {}
    if importlib.util.find_spec("transformer_engine") is None:
        found |= dict.fromkeys(TRANSFORMER_ENGINE_USERS, _transformer_engine)
    if importlib.util.find_spec("triton") is None:
        found |= dict.fromkeys(TRITON_USERS, _triton)
    return found


def patches() -> dict[str, Callable[[types.ModuleType], None]]:
    """Map modules that misbehave without Transformer Engine to fixes."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return {}
    return {
        "megatron.core.transformer.moe.moe_utils": define_te_general_gemm,
        "megatron.core.transformer.multi_latent_attention": _without_te,
    }


def define_te_general_gemm(module: types.ModuleType) -> None:
    """Define the name, which is undefined without transformer_engine and compared with None later."""
    module.__dict__.setdefault("te_general_gemm", None)


def _without_te(module: types.ModuleType) -> None:
    # It mistakes mock objects for transformer_engine's classes: isinstance() raises.
    module.HAVE_TE = False  # type: ignore[attr-defined]


def _transformer_engine() -> dict[str, types.ModuleType]:
    """Stand-in with the names that megatron.bridge.peft needs to define its classes."""
    root, pytorch = _module("transformer_engine"), _module("transformer_engine.pytorch")
    pytorch.Linear, pytorch.LayerNormLinear = _unusable("Linear"), _unusable("LayerNormLinear")
    pytorch.ops = types.SimpleNamespace(Sequential=_unusable("ops.Sequential"))
    root.pytorch = pytorch
    return {"transformer_engine": root, "transformer_engine.pytorch": pytorch}


def _triton() -> dict[str, types.ModuleType]:
    """Stand-in in which kernels can be defined (decorators return the function); launching one is a TypeError."""
    root, language = _module("triton"), _module("triton.language")
    root.__version__, root.language = "0", language
    root.jit = lambda function=None, **_: function if function else (lambda f: f)
    root.autotune = root.heuristics = lambda *_, **__: lambda f: f
    language.__getattr__ = lambda name: object
    return {"triton": root, "triton.language": language}


def _module(name: str) -> Any:
    module = types.ModuleType(name)
    module.__path__ = []
    return module


def _unusable(name: str) -> type[torch.nn.Module]:
    def __init__(self: object, *_: object, **__: object) -> None:
        raise RuntimeError(f"transformer_engine.{name} needs Transformer Engine, which is not installed")

    return type(name, (torch.nn.Module,), {"__init__": __init__})
