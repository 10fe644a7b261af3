"""Fully asynchronous RL post-training: Megatron-core trains, SGLang generates, neither waits for the other.

The folders are the flow: prompts → rollout → staleness → train_data → trainer → weights → engines.
``wiring/driver.py`` wires them, ``controller.py`` runs them; docs/architecture.md tells the whole story.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_async.runs import Config, Run, attach, start
    from miles_async.runs.launch import check

__version__ = "0.1.0"

__all__ = ["Config", "Run", "__version__", "attach", "check", "start"]


def __getattr__(name: str) -> object:
    """Import :mod:`miles_async.runs` once one of its names is used: importing a module of ours costs nothing more."""
    if name in __all__:
        return getattr(import_module("miles_async.runs.launch" if name == "check" else "miles_async.runs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
