"""The calculator: what is asked of it, and what it answers."""

from __future__ import annotations

import operator
import re

from examples.tool_model.calls import tool

CALCULATOR = tool("calculator", "Works out a sum, difference or product of two whole numbers.", "expression")

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(expression: str) -> str:
    """The value, or ``error`` for what is no expression.

    >>> calculate("17*23")
    '391'
    """
    match = re.fullmatch(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", expression)
    return str(_OPERATORS[match[2]](int(match[1]), int(match[3]))) if match else "error"
