"""Stand-ins for modules that megatron imports unconditionally.

megatron-bridge 0.6 imports transformer_engine in its LoRA layers, megatron-core 0.19 triton in kernels of Mamba and of
paged memory. None of it is used here: classes can be defined, but using one raises. An installed module gets no
stand-in. A GPU machine may lack them, too.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch

TRANSFORMER_ENGINE_USERS = ("megatron.bridge.peft.lora_layers",)
TRITON_USERS = ("megatron.core.ssm.ops.causal_conv1d_varlen", "megatron.core.transformer.moe.ops.paged_stash")


def stand_ins() -> dict[str, Callable[[], dict[str, types.ModuleType]]]:
    """Map each importing module to a function that makes the modules it lacks."""
    found: dict[str, Callable[[], dict[str, types.ModuleType]]] = {}
    if importlib.util.find_spec("transformer_engine") is None:
        found |= dict.fromkeys(TRANSFORMER_ENGINE_USERS, _transformer_engine)
    if importlib.util.find_spec("triton") is None:
        found |= dict.fromkeys(TRITON_USERS, _triton)
    return found


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
    root.Config = lambda *_, **__: None
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
