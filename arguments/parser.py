"""The command line of ``miles-async train``: words → frozen :class:`Arguments`.

Precedence: command line (with its ``@file`` arguments, in order; the last mention wins) over ``--config``
files over defaults. Nothing is abbreviated and nothing unknown ignored; unknown flags are reported together.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from rich.text import Text
from rich_argparse import RichHelpFormatter

from miles_async.arguments import Arguments
from miles_async.arguments.argument_files import expand_argument_files
from miles_async.arguments.config_file import read_config_file
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.foreign.translate import Given, translate
from miles_async.arguments.help_pages import Help
from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.megatron_settings import fields_table, megatron_settings
from miles_async.arguments.pass_through import PassThrough, flatten, split_pass_through
from miles_async.arguments.problems import refuse
from miles_async.arguments.specification import (
    FlagSpecification,
    Kind,
    argument_groups,
    flag_specifications,
    group_description,
    group_flags,
    group_title,
)
from miles_async.arguments.unknown_flags import explain_unknown
from miles_async.arguments.words import NEGATIVE_NUMBER, looks_like_flag
from miles_async.errors import ConfigurationError

DESCRIPTION = "Train a language model with fully asynchronous reinforcement learning."

EPILOG = """\
Examples:
  miles-async train @arguments.args                          flags from a file, as a shell would read them
  miles-async train @arguments.args --lr 1e-5                what comes later wins
  miles-async train @preset:1x8 @preset:qwen3-4b @preset:staleness-2 --hf-checkpoint ...
  miles-async train --config run.toml --max-weight-staleness 2
  miles-async train @arguments.args --print-config > run.toml
  miles-async train @arguments.args --dry-run                check everything, start nothing
  miles-async train @arguments.args --sglang-mem-fraction-static 0.8    for SGLang: --mem-fraction-static 0.8
  miles-async train @arguments.args --megatron-moe-permute-fusion       a field of Megatron's configs
"""


METAVARS: Mapping[Kind, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}

_KEY_OF_VERL = re.compile(r"\+{0,2}[a-zA-Z_]\w*(\.\w+)+=")
_IGNORED = re.compile(r"(\S+): ignored explicit argument (.*)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCommandLine:
    """Parsed command line. The arguments are typed and complete, but not validated yet."""

    arguments: Arguments
    print_config: bool
    dry_run: bool
    notes: tuple[str, ...] = ()  # about flags of other systems that change nothing here, or something else
    checks: Mapping[str, Given] = dataclasses.field(default_factory=dict)  # of other systems → values; must agree


def parse_arguments(argv: Sequence[str], *, prog: str = "miles-async train") -> ParsedCommandLine:
    """Read a command line. Raises ConfigurationError naming the bad flags; ``--help`` raises SystemExit."""
    parser = _built_parser(prog)
    ours = list(parser._option_string_actions)
    translation = translate(expand_argument_files(argv))
    words, passed = split_pass_through(list(as_megatron_flags(translation.words, ours)), ours)
    refuse([*translation.problems.values(), *_unknown(words, ours)])
    namespace, unexpected = parser.parse_known_args(words)
    if unexpected:
        raise ConfigurationError(_why_unexpected(unexpected[0], words, parser))
    given = vars(namespace)
    print_config, dry_run = given.pop("print_config"), given.pop("dry_run")
    values: dict[str, FlagValue] = {}
    passed_by_files: PassThrough = {}
    for path in given.pop("config"):
        file_values, file_passed = read_config_file(path)
        values |= file_values
        passed_by_files |= file_passed
    values |= {name: _collected(value) if isinstance(value, list) else value for name, value in given.items()}
    arguments = assemble(values, passed_by_files | passed)
    megatron_settings(arguments.model.megatron_extra)  # refuses what cannot be set
    return ParsedCommandLine(
        arguments=arguments,
        print_config=print_config,
        dry_run=dry_run,
        notes=tuple(translation.notes.values()),
        checks=translation.checks,
    )


def _why_unexpected(word: str, words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Say what a word was probably meant to be that no flag takes."""
    before = words[place - 1] if (place := list(words).index(word)) else ""
    path = Path(word)
    advice = "every value needs its flag before it"
    if isinstance(action := parser._option_string_actions.get(before), argparse.BooleanOptionalAction):
        advice = _switch(action.option_strings)
    elif _KEY_OF_VERL.match(word):
        advice = "it looks like a key of verl, whose command lines `miles-async migrate SCRIPT` translates"
    elif path.suffix == ".toml":
        advice = f"files of flags are given as --config {word}"
    elif path.suffix == ".args" or path.is_file():
        advice = f"did you mean @{word}?"
    elif word.startswith(("–", "—")):
        advice = f"it begins with a dash that is no hyphen: --{word.lstrip('–—-')}"
    return f"unexpected argument {word!r}: {advice}"


def _switch(options: Sequence[str]) -> str:
    return f"{options[0]} is a switch without a value; {options[-1]} turns it off"


def _collected(values: list[str | None]) -> tuple[str, ...] | None:
    """Value of a flag that takes several; "none" alone means None."""
    return None if values == [None] else tuple(value for value in values if value is not None)


def assemble(values: Mapping[str, FlagValue], passed: PassThrough) -> Arguments:
    """Field name → value, over all groups, as one object; missing fields have their defaults."""
    by_group: dict[str, dict[str, FlagValue]] = {group: {} for group in argument_groups()}
    for name, value in values.items():
        by_group[flag_specifications()[name].group][name] = value
    for where, words in flatten(passed).items():
        by_group[where.group][where.field] = words
    return Arguments(**{group: argument_groups()[group](**fields) for group, fields in by_group.items()})


def build_parser(prog: str) -> argparse.ArgumentParser:
    """One argparse group per dataclass. Defaults are suppressed, to distinguish given flags."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [@FILE ...] [--config FILE] [--FLAG VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser._negative_number_matcher = NEGATIVE_NUMBER
    general = parser.add_argument_group("This command")
    general.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE",
        help="read flags from a TOML file (keys are flag names, at the top or in a table per group below); "
        "flags on the command line win",
    )  # fmt: skip
    general.add_argument("--print-config", action="store_true", help="print all flags as such a TOML file and exit")
    general.add_argument("--dry-run", action="store_true", help="check flags, model and data, and exit")
    general.add_argument(
        "-h", "--help", action=Help, nargs="*", default=argparse.SUPPRESS, metavar="GROUP | WORD",
        help="list the most needed flags, explain a group's flags, or find flags whose name or text has these words",
    )  # fmt: skip
    general.add_argument("--help-all", action="help", help="explain every flag and exit")
    general.add_argument(
        "--help-megatron", action=_HelpMegatron, nargs=0, default=argparse.SUPPRESS,
        help="list the fields that --megatron-X sets and exit",
    )  # fmt: skip
    for name in argument_groups():
        group = parser.add_argument_group(group_title(name), group_description(name))
        for specification in group_flags(name):
            _add_flag(group, specification)
    return parser


_built_parser = cache(build_parser)  # 5 ms


class _HelpFormatter(RichHelpFormatter):
    """Fixed columns; texts of several lines (the examples) stay as written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _rich_fill_text(self, text: Text, width: int, indent: Text) -> Text:
        if "\n" not in text.plain.strip():
            return super()._rich_fill_text(text, width, indent)
        return Text("\n").join(indent + line for line in text.split()) + "\n\n"


class _Parser(argparse.ArgumentParser):
    """Reports errors as exceptions; ``miles_async.cli`` alone turns them into an exit code."""

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        if (found := _IGNORED.fullmatch(text)) is not None:
            text = f"{found[2]}: {_switch(found[1].split('/'))}"
        raise ConfigurationError(text)


class _HelpMegatron(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        print(fields_table(), end="")
        parser.exit()


def _add_flag(group: argparse._ArgumentGroup, specification: FlagSpecification) -> None:
    add = partial(
        group.add_argument,
        specification.flag,
        help=_help(specification),
        default=argparse.SUPPRESS,
        dest=specification.name,
    )
    if specification.kind is bool:
        add(action=argparse.BooleanOptionalAction)
        return

    def convert(text: str) -> FlagValue:
        try:
            return specification.from_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    default = "{" + ",".join(specification.accepted) + "}" if specification.choices else METAVARS[specification.kind]
    add(type=convert, metavar=specification.metavar or default, nargs="*" if specification.many else None)


def _help(specification: FlagSpecification) -> str:
    text = specification.help
    if "default:" not in text.lower() and "(required)" not in text:
        text += f" (default: {_shown(specification.default)})"
    return text.replace("%", "%%")


def _shown(value: FlagValue) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case tuple():
            return " ".join(value) or "none"
        case None:
            return "none"
    return str(value)


def _unknown(words: Iterable[str], ours: Sequence[str]) -> list[str]:
    known = set(ours)
    flags = [word.partition("=")[0] for word in words if looks_like_flag(word)]
    return [explain_unknown(flag, ours) for flag in dict.fromkeys(flags) if flag not in known]
