"""Gather tokens from the other data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""[n] of this rank → those of all data-parallel ranks behind one another; n may differ. Collective."""


def alone(values: Tensor) -> Tensor:
    """Gather where there is one rank."""
    return values
