"""argparse for commands other than ``train``."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from miles_async.arguments.words import NEGATIVE_NUMBER
from miles_async.errors import ConfigurationError


def at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {word!r}")
    return int(word)


class CommandParser(argparse.ArgumentParser):
    """Reports errors as exceptions; ``miles_async.cli`` alone turns them into an exit code."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")
