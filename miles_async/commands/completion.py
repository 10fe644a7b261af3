"""``miles-async completion SHELL``: a script with which the shell completes commands, flags and their choices."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import shtab

from miles_async.arguments.help_pages import Help
from miles_async.arguments.parser import build_parser
from miles_async.arguments.specification import argument_groups, flag_specifications, group_title
from miles_async.commands.parser import CommandParser


def completion(words: Sequence[str], commands: Iterable[str]) -> str:
    """The script for the shell that ``words`` names. Raises ConfigurationError for another one."""
    parser = CommandParser(
        "miles-async completion",
        "Print a script that completes commands, flags and their choices. For bash, once: "
        "miles-async completion bash > ~/.local/share/bash-completion/completions/miles-async",
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return shtab.complete(_whole_parser(commands), parser.parse_args(words).shell) + "\n"


def _whole_parser(commands: Iterable[str]) -> argparse.ArgumentParser:
    """The command line as one parser. Runs have the flags of ``train``; the other commands complete paths."""
    parser = argparse.ArgumentParser("miles-async", add_help=False)
    places = parser.add_subparsers()
    for command in commands:
        parents = [_with_values(build_parser("miles-async train"))] if command in ("train", "rollout", "eval") else []
        place = places.add_parser(command, parents=parents, add_help=False, help=command)  # without help it is left out
        place.add_argument("words", nargs="*").complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _with_values(train: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for action in train._actions:
        specification = flag_specifications().get(action.dest)
        if isinstance(action, Help):
            action.choices = [group_title(group).lower() for group in argument_groups()]
        elif specification is not None and specification.choices:
            action.choices = specification.choices
        elif specification is not None and specification.kind is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return train
