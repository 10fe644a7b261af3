"""Flags of a run, from the words of a command line and from keyword arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.parser import parse_arguments
from miles_async.errors import ConfigurationError

FlagArgument = bool | int | float | str | Path | None | Sequence[str | Path]
"""Value of a keyword argument: None is the word "none", False the ``--no-...`` form of a flag."""


@dataclass(frozen=True)
class Config:
    """Flags of one run, read and checked as ``miles-async train`` reads them."""

    words: tuple[str, ...]  # of a command line
    arguments: Arguments = field(init=False, repr=False, compare=False)  # the value of every flag

    def __post_init__(self) -> None:
        parsed = parse_arguments(self.words)
        if parsed.print_config or parsed.dry_run:
            raise ConfigurationError(
                "--print-config and --dry-run are for the command line: expected flags of a run; its flags are in "
                f"Config.arguments, and `miles-async train {shlex.join(self.words)}` checks them"
            )
        object.__setattr__(self, "arguments", parsed.arguments)

    @classmethod
    def from_args(cls, words: Sequence[str] = (), **flags: FlagArgument) -> Config:
        """Read the words of a command line, then ``flags``, which win.

        Raises ConfigurationError naming every unknown flag and unusable value.

        >>> config = Config.from_args(["@preset:1x8", "@preset:qwen3-4b"], lr=1e-6, rollout_stop=["</answer>"])
        """
        if isinstance(words, str):
            raise ConfigurationError(f"from_args({words!r}): expected a list of words, such as {shlex.split(words)}")
        return cls((*words, *_as_words(flags)))

    def having(self, *words: str, **flags: FlagArgument) -> Config:
        """The same flags with others after them, which win."""
        return Config((*self.words, *words, *_as_words(flags)))


def _as_words(flags: Mapping[str, FlagArgument]) -> Iterator[str]:
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        match value:
            case True:
                yield flag
            case False:
                yield "--no-" + flag[2:]
            case None:
                yield from (flag, "none")
            case int() | float() | str() | Path():
                yield from (flag, str(value))
            case list() | tuple() if all(isinstance(each, str | Path) for each in value):
                yield from (flag, *map(str, value))
            case _:
                raise ConfigurationError(
                    f"{name}={value!r}: expected a number, a text, a path, True, False, None or a list of texts for "
                    f"{flag}; functions and classes are arguments of miles_async.start, such as reward=my_function"
                )
