"""Flags of a run, from the words of a command line and from keyword arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field, replace
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.argument_files import as_typed, expand_argument_files
from miles_async.arguments.evaluation_alone import evaluation_alone
from miles_async.arguments.parser import ParsedCommandLine, parse_arguments
from miles_async.errors import ConfigurationError

FlagArgument = bool | int | float | str | Path | None | Sequence[str | Path]
"""Value of a keyword argument: None is the word "none", False the ``--no-...`` form of a flag."""


def expect_config(config: object) -> None:
    """Raise ConfigurationError for what a caller may take for a Config, such as a list of words."""
    if not isinstance(config, Config):
        raise ConfigurationError(f"expected a Config, such as Config.from_args([...]), found {config!r:.80}")


@dataclass(frozen=True)
class Config:
    """Flags of one run, as ``miles-async train`` reads them."""

    words: tuple[str, ...]  # of a command line, without argument files: these may change
    parsed: ParsedCommandLine = field(repr=False, compare=False)
    directory: Path = field(default_factory=Path.cwd)  # where relative paths among the flags begin

    @classmethod
    def from_args(cls, words: Sequence[str] = (), **flags: FlagArgument) -> Config:
        """Read the words of a command line, then ``flags``, which win.

        Raises ConfigurationError naming every unknown flag and unusable value.

        >>> config = Config.from_args(["@preset:1x8", "@preset:qwen3-4b"], lr=1e-6, rollout_stop=["</answer>"])
        """
        if isinstance(words, str):
            raise ConfigurationError(f"from_args({words!r}): expected a list of words, such as {shlex.split(words)}")
        config = cls.read((*words, *_as_words(flags)))
        if config.parsed.print_config or config.parsed.dry_run:
            raise ConfigurationError(
                "--print-config and --dry-run are for the command line: expected flags of a run; its flags are in "
                "Config.arguments, and miles_async.check(config) checks them"
            )
        return config

    @classmethod
    def read(cls, words: Sequence[str]) -> Config:
        """Read a whole command line, which may ask for more than a run: ``--help``, ``--dry-run``."""
        words = [*map(as_typed, expand_argument_files(words))]
        parsed = parse_arguments(words)
        if parsed.arguments.evaluation.eval_only:
            parsed = replace(parsed, arguments=evaluation_alone(parsed.arguments))
        return cls(tuple(words), parsed)

    @property
    def arguments(self) -> Arguments:
        """The value of every flag."""
        return self.parsed.arguments

    def having(self, *words: str, **flags: FlagArgument) -> Config:
        """The same flags with others after them, which win."""
        with chdir(self.directory):
            return Config.from_args((*self.words, *words), **flags)


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
                yield from (flag, as_typed(str(value)))
            case list() | tuple() if all(isinstance(each, str | Path) for each in value):
                yield from (flag, *(as_typed(str(each)) for each in value))
            case _:
                raise ConfigurationError(
                    f"{name}={value!r}: expected a number, a text, a path, True, False, None or a list of texts for "
                    f"{flag}; functions and classes are arguments of miles_async.start, such as reward=my_function"
                )
