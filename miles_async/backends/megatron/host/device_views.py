"""A view of ``torch`` in which every CUDA device is the host. ``torch`` itself stays as it is.

For megatron-core 0.19 and megatron-bridge 0.6, which write ``device="cuda"``, ``torch.cuda.current_device()`` and
``torch.cuda.Stream()`` literally. ``torch.cuda.is_available()`` remains False.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

FACTORIES = (
    "tensor as_tensor zeros ones empty full arange linspace eye rand randn randint randperm "
    "zeros_like ones_like empty_like full_like"
).split()


class View(types.ModuleType):
    """A module with ``overrides`` in front of the real module's attributes."""

    def __init__(self, real: types.ModuleType, overrides: dict[str, object]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(overrides)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class HostEvent(torch.cpu.Event):
    """An event that has already happened, with the arguments of CUDA's."""

    def __init__(self, *_: object, **__: object) -> None: ...


class HostStream(torch.cpu.Stream):
    """A stream on the host: one in-order queue, always drained, with the arguments of CUDA's."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()


def torch_view() -> View:
    """Make the view that replaces ``torch`` inside megatron modules."""
    overrides: dict[str, object] = {name: _on_host(getattr(torch, name)) for name in FACTORIES}
    overrides["cuda"] = _cuda_view()
    return View(torch, overrides)


def patch_cuda_methods() -> None:
    """Make ``tensor.cuda()`` and ``module.cuda()`` no-ops; without CUDA they raise."""
    torch.Tensor.cuda = _same  # type: ignore[method-assign]
    torch.nn.Module.cuda = _same  # type: ignore[method-assign]


def _same(self: T, *_: object, **__: object) -> T:
    return self


def _host_device(device: Any) -> Any:
    """Map "cuda", "cuda:3", CUDA device objects and bare ordinals to the host."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, str | torch.device) and str(device).startswith("cuda"):
        return "cpu"
    return device


def _on_host(factory: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(factory)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "device" in kwargs:
            kwargs["device"] = _host_device(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _cuda_view() -> View:
    overrides: dict[str, object] = {
        "current_device": lambda: "cpu",  # every caller passes it on as device=
        "Stream": HostStream,
        "Event": HostEvent,
        "stream": contextlib.nullcontext,
        "current_stream": lambda *_: HostStream(),
        "get_rng_state": torch.get_rng_state,
        "manual_seed": torch.manual_seed,
        "synchronize": lambda: None,
    }
    return View(torch.cuda, overrides)
