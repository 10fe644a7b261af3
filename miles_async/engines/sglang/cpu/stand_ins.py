"""Lets missing packages be imported and referred to, though not used.

SGLang's server imports torchvision, triton and ``sgl_kernel`` at module level even where nothing of them runs
(``--device cpu``, text models). Here ``import triton.language as tl`` succeeds where triton is absent;
using a name of it raises NotImplementedError. Packages that are installed are left alone. What does run of
``sgl_kernel`` on a CPU is in ``gated_delta``.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

_DECORATOR_FACTORIES = ("triton.jit", "triton.autotune", "triton.heuristics")


def install() -> None:
    """Stand in for missing packages. Call before SGLang is imported."""
    if is_absent("torchvision"):
        _allow_torchvision()
    if is_absent("triton"):
        _allow_triton()
    if is_absent("sgl_kernel"):
        _allow_sgl_kernel()


class _MentionedType(type):
    """A class that has every attribute: enough for ``T.X``, ``class A(T.B)`` and ``isinstance(x, T.C)``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _mentioned(f"{cls.__name__}.{name}")


def _mentioned(full_name: str) -> _MentionedType:
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        # As a decorator, bare or with arguments, it hands the function back.
        if len(args) == 1 and isinstance(args[0], types.FunctionType) and not kwargs:
            return args[0]
        if (not args and kwargs) or full_name in _DECORATOR_FACTORIES:
            return lambda function: function
        raise NotImplementedError(f"{full_name} is not installed in this environment")

    return _MentionedType(full_name, (), {"__new__": __new__})


class AbsentPackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader for ``root`` and everything below; ``values`` are names that must really work."""

    def __init__(self, root: str, values: Mapping[str, Any]) -> None:
        """``values``: dotted below root ("language.constexpr") → object."""
        self._root = root
        self._values = {f"{root}.{name}": value for name, value in values.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._root or fullname.startswith(self._root + "."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            value = _mentioned(f"{module.__name__}.{name}")
            setattr(module, name, value)
            return value

        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        for name, value in self._values.items():
            parent, _, leaf = name.rpartition(".")
            if parent == module.__name__:
                setattr(module, leaf, value)


def is_absent(root: str) -> bool:
    """True if ``import root`` would fail."""
    return root not in sys.modules and importlib.util.find_spec(root) is None


def allow_mentioning(root: str, values: Mapping[str, Any]) -> None:
    """Install the finder for ``root``, after all real ones."""
    sys.meta_path.append(AbsentPackage(root, values))


def _allow_torchvision() -> None:
    from transformers.utils import import_utils

    # Answered now, "no", and cached: afterwards the name would seem to be installed.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    allow_mentioning("torchvision", {"__version__": "0"})


def _allow_sgl_kernel() -> None:
    from miles_async.engines.sglang.cpu import gated_delta  # torch, which must look for triton first

    allow_mentioning("sgl_kernel", {"__version__": "0.0.0", **gated_delta.MODULE})
    gated_delta.offer_operators()


def _allow_triton() -> None:
    import torch._inductor.runtime.triton_compat  # noqa: F401  (torch must keep knowing that there is no triton)
    from torch.utils import _triton

    _triton.has_triton_package()
    _triton.has_triton()

    class Config:
        """Autotuning configurations are built at import and never read."""

        def __init__(self, *args: object, **kwargs: object) -> None: ...

    class Constexpr:
        """Module-level constants of kernels that never run."""

        def __init__(self, value: object = None) -> None:
            self.value = value

    allow_mentioning(
        "triton",
        {
            "__version__": "3.0.0",
            "cdiv": lambda a, b: -(a // -b),
            "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
            "Config": Config,
            "language.constexpr": Constexpr,
        },
    )
