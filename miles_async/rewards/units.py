"""Units of measurement in answers, which math-verify removes without comparing them."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAMES = {
    "mm": "millimet(?:er|re)s?",
    "cm": "centimet(?:er|re)s?",
    "dm": "decimet(?:er|re)s?",
    "m": "met(?:er|re)s?",
    "km": "kilomet(?:er|re)s?",
    "in": "inch(?:es)?",
    "ft": "foot|feet",
    "yd": "yards?",
    "mi": "miles?",
    "mg": "milligrams?",
    "g": "grams?",
    "kg": "kilograms?",
    "oz": "ounces?",
    "lb": "lbs|pounds?",
    "mL": "ml|millilit(?:er|re)s?",
    "L": "l|lit(?:er|re)s?",
    "ms": "milliseconds?",
    "s": "secs?|seconds?",
    "min": "mins?|minutes?",
    "h": "hrs?|hours?",
    "day": "days?",
    "week": "weeks?",
    "month": "months?",
    "year": "years?",
    "degree": "deg|degrees?",
    "radian": "rad|radians?",
    "dollar": "dollars?",
    "cent": "cents?",
    "m/s": "mps",
    "km/h": "kmh|kph",
    "mph": "mi/h",
}
_UNITS = {unit: re.compile(f"{unit}|(?i:{names})") for unit, names in _NAMES.items()}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "²": "2", "³": "3"}

_SPACE = r"(?:\s|~|\$|\\[ ,;:!])*"
_QUANTITY = re.compile(  # one number, perhaps "x =" before it: in 2m + 3s the letters may be unknowns
    r"((?:[A-Za-z]\s*=)?(?:[^A-Za-z\\]|\\(?:[dt]?frac|sqrt|pi|cdot|times)(?![A-Za-z])|\\[ ,;:!$])*[\d})])"
    + _SPACE
    + r"(?:(square|sq|cubic)\.?\s+)?([A-Za-z]+(?:/[A-Za-z]+)?)\.?(?:\^\{?([23])\}?|([²³]))?\.?"
    + _SPACE
)


class Quantity(NamedTuple):
    """A number and the unit that follows it, such as ("5", "cm^2")."""

    number: str
    unit: str


def read_quantity(text: str) -> Quantity | None:
    r"""Split a number from its unit, in one spelling; None if there is no unit, or none that is known.

    >>> read_quantity(r"5\,cm^2"), read_quantity("2.5 square meters"), read_quantity("72 eggs")
    (Quantity(number='5', unit='cm^2'), Quantity(number='2.5', unit='m^2'), None)
    """
    if (found := _QUANTITY.fullmatch(text.strip())) is None:
        return None
    number, before, name, exponent, sign = found.groups()
    unit = next((unit for unit, names in _UNITS.items() if names.fullmatch(name)), None)
    if unit is None:
        return None
    power = exponent or _POWERS.get(before or sign or "")
    return Quantity(number.strip(" $"), f"{unit}^{power}" if power else unit)
