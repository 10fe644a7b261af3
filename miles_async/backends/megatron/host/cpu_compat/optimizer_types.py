"""Optimizers tell parameter types by name ("torch.cuda.FloatTensor") and expect the fused Adam's state.

For megatron-core 0.16: ``optimizer.py``, ``distrib_optimizer.py`` and ``clip_grads.py`` compare
``param.type()`` with names that only exist on CUDA. Only while those functions run, host types carry these names.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    real = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return real(self, *args, **kwargs)
        return real(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del torch.Tensor.type


def _under_cuda_type_names(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


def _patch_optimizer(module: types.ModuleType) -> None:
    mixed: Any = module.Float16OptimizerWithFloat16Params
    mixed.__init__ = _under_cuda_type_names(mixed.__init__)


def _patch_distrib_optimizer(module: types.ModuleType) -> None:
    distributed: Any = module.DistributedOptimizer
    distributed.__init__ = _under_cuda_type_names(distributed.__init__)
    put = distributed._set_main_param_and_optimizer_states

    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, object]) -> Any:
        # torch's AdamW keeps "step" per parameter, the fused Adam does not; 0.16 loads it elsewhere
        # (load_parameter_state) and then trips over its absence here.
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        kept = {"step": state["step"]} if "step" in state else {}
        return put(self, model_param, {**kept, **tensors})

    distributed._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states


def _patch_clip_grads(module: types.ModuleType) -> None:
    clip = module.clip_grad_by_total_norm_fp32
    module.clip_grad_by_total_norm_fp32 = _under_cuda_type_names(clip)  # type: ignore[attr-defined]


PATCHES = {
    "megatron.core.optimizer.optimizer": _patch_optimizer,
    "megatron.core.optimizer.distrib_optimizer": _patch_distrib_optimizer,
    "megatron.core.optimizer.clip_grads": _patch_clip_grads,
}
