"""Declare a dataclass field as a flag: ``flag(default, "help")`` instead of ``dataclasses.field``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NewType, TypeVar

FlagValue = bool | int | float | str | Path | tuple[str, ...] | None
"""Types that a flag may have."""

ModuleAttr = NewType("ModuleAttr", str)
"""``module:attr``, which names a user's object."""

LONGEST_WAIT = 1e9
"""Largest number of seconds or minutes, which means without end: clocks of threads and collectives end later."""

T = TypeVar("T", bound=FlagValue)


def flag(
    default: T,
    help: str,
    *,
    metavar: str | None = None,
    needs: tuple[str, ...] = (),
    replaced_by: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> T:
    """A field that is also a command-line flag: ``max_weight_staleness`` becomes ``--max-weight-staleness``.

    The field's annotation gives the type: ``int``, ``float``, ``str``, ``Path``, ``bool`` (then ``--x`` and
    ``--no-x``), ``X | None`` (the word "none" means None), ``tuple[str, ...]`` (several values), ``Literal["a", "b"]``
    (one of these), ``Literal["a", "b"] | ModuleAttr`` (or the user's own).

    ``needs``: fields without which the flag has no effect; one of them is enough. ``use_tis`` has to be given,
    ``policy_loss=gspo`` has to have this value, ``policy_loss=own`` to name a user's object.
    ``replaced_by``: fields of which each makes it ineffective. ``at_least``, ``above``, ``at_most`` and ``below`` bound
    a number.
    """
    if metavar in ("SECONDS", "MINUTES"):
        at_most = LONGEST_WAIT
    bounds = {"at least": at_least, "more than": above, "at most": at_most, "less than": below}
    metadata = {"default": default, "help": help, "metavar": metavar, "needs": needs, "replaced_by": replaced_by}
    return dataclasses.field(default=default, metadata={**metadata, "bounds": bounds})
