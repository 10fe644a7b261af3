"""SGLang's source, read and not imported: that takes 10 s."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_PACKAGE = find_spec("sglang")
assert _PACKAGE is not None
assert _PACKAGE.origin is not None

SRT = Path(_PACKAGE.origin).parent / "srt"
"""Folder of its modules."""


def module_source(name: str) -> str:
    """Text of a module, named as it is imported."""
    return (SRT.parents[1] / name.replace(".", "/")).with_suffix(".py").read_text()
