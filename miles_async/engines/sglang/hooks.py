"""In the server's process: hooks into SGLang's functions, by its own registry (0.5.23)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

Kind = Literal["BEFORE", "AFTER", "AROUND", "REPLACE"]


@cache  # a server that is forked from a process which has imported the launcher imports it again
def hook(target: str, function: Callable[..., Any], kind: Kind = "AROUND") -> None:
    """Register ``function`` for the function of SGLang with the dotted path ``target``; a second time has no effect.

    AROUND, it gets that function and its arguments; AFTER, the result and the arguments; BEFORE and REPLACE, the
    arguments.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType[kind])
