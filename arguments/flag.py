"""How a dataclass field becomes a flag: ``flag(default, "help")`` instead of ``dataclasses.field``."""

from __future__ import annotations

import dataclasses
from typing import Any


def flag(default: Any, help: str, *, choices: tuple[str, ...] = (), metavar: str | None = None) -> Any:
    """A field that is also a command-line flag: ``max_weight_staleness`` becomes ``--max-weight-staleness``.

    The field's annotation gives the type: ``int``, ``float``, ``str``, ``Path``, ``bool`` (then ``--x`` and
    ``--no-x``), ``X | None`` (the word "none" means None), ``tuple[str, ...]`` (several values).
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})
