"""Words of bash: where quotes, substitutions and arrays end, what arithmetic and ``seq`` give."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from miles_async.arguments.argument_files import outside_quotes, without_comment
from miles_async.commands.migrate.printed import without_printed
from miles_async.errors import ConfigurationError

ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
# Brackets in it may be nested three deep, as in $(f $(g $((1)))).
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)|`[^`]*`")
OTHERS = "ARGUMENTS_OF_A_FUNCTION"
ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")
_FUNCTION = re.compile(r"\s*(?:function\s+[\w-]+|[\w-]+\s*\(\s*\))")
_ENDS_VALUE = re.compile(r"[;\s]")
_OVERRIDES = re.compile(r"(?:[+~]*[\w.]+=\S*(?:\s+|$))+")  # of Hydra
_BLANK = "\x1f"  # stands for a blank that separates no words
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
_ENDS_COMMAND = re.compile(r"\s(?:\d?>|[|&;])")  # a pipe, a redirection, or another command
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_ONLY_THE_SHELL_KNOWS = ("$(", "`")
DESCRIPTION = "model_args_utils.py"  # of miles: prints flags that describe a model, which config.json does here
_LONGEST_TEXT = 200  # lines


def array_words(first: str, lines: deque[str]) -> Iterator[str]:
    """Words up to the closing bracket. What follows it becomes the first of ``lines``."""
    lines.appendleft(first)
    while lines:
        inner = without_comment(lines.popleft())
        end = _closing(inner)
        yield from split(inner[:end])
        if end is not None:
            lines.appendleft(inner[end + 1 :])
            return


def _closing(line: str) -> int | None:
    """Place of the first closing bracket outside of quotes that nothing in ``line`` opened."""
    depth = 0
    for place, character in outside_quotes(line):
        if character == ")" and not depth:
            return place
        depth += {"(": 1, ")": -1}.get(character, 0)
    return None


def to_closing_quote(value: str, lines: deque[str]) -> str:
    """Append the ``lines`` on which quoted text of ``value`` continues, if a quote closes it."""
    whole = value
    for taken, line in enumerate(["", *islice(lines, _LONGEST_TEXT)]):
        whole += f"\n{line}" if taken else ""
        if not re.search("[\"']", _QUOTED.sub("", without_comment(whole))):
            for _ in range(taken):
                lines.popleft()
            return without_comment(whole)
    return value


def value_and_rest(text: str) -> tuple[str, str]:
    """Split ``text``, an assignment after its =, into the value and the rest of the line."""
    end = _ENDS_VALUE.search(_masked(_SUBSTITUTION.sub(lambda found: "x" * len(found[0]), text)))
    return (text[: end.start()], text[end.start() :].strip()) if end else (text, "")


def scalar(text: str) -> list[str] | None:
    """Words of a value: several only where it holds flags, as scripts keep them in one variable; None if only the shell
    knows it. What follows it is left out.
    """
    value, _ = value_and_rest(text)
    if DESCRIPTION in value:
        return [f"$({DESCRIPTION})"]
    if is_substituted(without_printed(value)) or value.count('"') % 2 or value.count("'") % 2:
        return None
    return [word for part in split(value) for word in several_words(part)]


def several_words(value: str) -> list[str]:
    """Words of a variable's value, which are put in without quotes if they are flags or overrides."""
    return split(value.strip()) if is_several(value) else [value]


def is_several(value: str) -> bool:
    """True for flags or overrides, even if it is one."""
    text = value.strip()
    return text.startswith("--") or _OVERRIDES.fullmatch(text) is not None


def refers_to(name: str, words: Sequence[str]) -> bool:
    """True if one of ``words`` contains the variable."""
    return any(re.search(rf"\$\{{?{name}\b", word) for word in words)


def to_its_end(text: str) -> list[str]:
    """Words of a command, without what follows it."""
    end = _ENDS_COMMAND.search(_masked(text))
    return split(text[: end.start()] if end else text)


def _masked(text: str) -> str:
    """``text`` with its quoted parts made letters."""
    return _QUOTED.sub(lambda found: "x" * len(found[0]), text)


def with_arguments(lines: Sequence[str]) -> Iterator[str]:
    """Lines in which a name stands for the arguments of a function, or of ``set --``: the script's own are none."""
    inside = given = False
    for line in lines:
        begins = _FUNCTION.match(line) is not None
        inside = inside or begins
        given = given or re.match(r"\s*set\s+--\s+\S", line) is not None
        yield ARGUMENTS.sub(f"${{{OTHERS}[@]}}", line) if inside or given else line
        inside = inside and not line.startswith("}") and not (begins and line.rstrip().endswith("}"))


def is_substituted(text: str) -> bool:
    """True if another program prints a part of it."""
    return any(mark in ARITHMETIC.sub("", text) for mark in _ONLY_THE_SHELL_KNOWS)


def sequence(given: Sequence[str]) -> list[str] | None:
    """Output of ``seq LAST``, ``seq FIRST LAST`` or ``seq FIRST STEP LAST``; None unless all are whole numbers."""
    try:
        numbers = [int(number) for number in given]
        first, step, last = {1: (1, 1, *numbers), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers), numbers)
        return [str(number) for number in range(first, last + (1 if step > 0 else -1), step)]
    except (ValueError, IndexError):  # no number, not one to three, or a step of 0
        return None


def split(line: str) -> list[str]:
    """Words of a line. A substitution, ``$(...)``, is a part of one word, whatever blanks it has."""
    joined = _SUBSTITUTION.sub(lambda found: re.sub(r"\s", _BLANK, found[0]), without_comment(line))
    try:
        return [word.replace(_BLANK, " ") for word in shlex.split(joined)]
    except ValueError as error:
        raise ConfigurationError(f"{error}: {line.strip()!r}") from None


def compute(node: ast.expr) -> int:
    """Whole numbers with + - * /. Raises TypeError for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return int(_OPERATORS[type(kind)](compute(left), compute(right)))
    raise TypeError
