"""Adjust each megatron module after its import: replace its ``torch`` by the view and apply its patch."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

SCOPE = ("megatron.core", "megatron.bridge", "megatron.training")

Patch = Callable[[types.ModuleType], None]
StandIn = Callable[[], Mapping[str, types.ModuleType]]


def install(view: types.ModuleType, patches: Mapping[str, Patch], stand_ins: Mapping[str, StandIn]) -> None:
    """Adjust all megatron modules, those already imported and later ones."""
    sys.meta_path.insert(0, _Finder(view, patches, stand_ins))
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(SCOPE):
            _adjust(module, view, patches)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, view: types.ModuleType, patches: Mapping[str, Patch], stand_ins: Mapping[str, StandIn]) -> None:
        self._view, self._patches, self._stand_ins = view, patches, stand_ins

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(SCOPE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run_body = spec.loader.exec_module
        stand_in = self._stand_ins.get(name)

        def exec_module(module: types.ModuleType) -> None:
            with _visible(stand_in()) if stand_in else contextlib.nullcontext():
                run_body(module)
            _adjust(module, self._view, self._patches)

        loader: Any = spec.loader
        loader.exec_module = exec_module
        return spec


def _adjust(module: types.ModuleType, view: types.ModuleType, patches: Mapping[str, Patch]) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = view  # type: ignore[attr-defined]
    if patch := patches.get(module.__name__):
        patch(module)


@contextlib.contextmanager
def _visible(modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Make stand-ins importable only while one module's body runs, so that no other module finds them."""
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
