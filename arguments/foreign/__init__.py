"""Flags of other systems: one table that says of each whether it works here, is checked, changes nothing or is refused.

``translate.py`` applies it to a command line, ``checks.py`` makes the comparisons, and ``miles-async migrate
--table`` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.arguments.foreign.engines import ENGINES
from miles_async.arguments.foreign.megatron import MEGATRON
from miles_async.arguments.foreign.record import ForeignFlag, ForeignValue
from miles_async.arguments.foreign.shapes import SHAPES
from miles_async.arguments.foreign.slime import OTHERS, SLIME
from miles_async.arguments.foreign.values import VALUES

FOREIGN_FLAGS: Mapping[str, ForeignFlag] = {row.flag: row for row in (*SLIME, *OTHERS, *MEGATRON, *SHAPES, *ENGINES)}

FOREIGN_VALUES: Mapping[tuple[str, str], ForeignValue] = {(row.flag, row.value): row for row in VALUES}
"""(flag of ours, value of another system) → what becomes of it."""
