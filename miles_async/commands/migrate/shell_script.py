"""Read the command that a shell script would run, without running it: enough of bash for recipes of other systems.

Arrays, assignments, ``source``, arithmetic, comments and continued lines are read; variables are put in where the
script says their values. Conditions and loops are not followed, and what only the shell can know stays as it is: both
are reported.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments.argument_files import without_comment
from miles_async.errors import ConfigurationError

_ASSIGNMENT = re.compile(r"\s*(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(\(?)(.*)")
_BEFORE = re.compile(r"""\s*(?:export\s+)?(\w+)=((?:[^\s"'(]|"[^"]*"|'[^']*')*)\s+(?:&&\s+)?""")  # A=1 command
_SOURCE = re.compile(r"\s*(?:source|\.)\s+(\S+)")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_PLAIN = re.compile(r"\$\{?(\w+)\}?")
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::?-((?:[^{}]|\$\{\w+\})*))?\}")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_ONLY_THE_SHELL_KNOWS = ("$(", "`")


@dataclass(kw_only=True, slots=True)
class ShellCommand:
    """A program's arguments, and doubts about them."""

    program: str  # the last part of its path
    words: list[str]
    unknown: list[str] = field(default_factory=list)  # variables that stand in words as they are
    repeated: list[str] = field(default_factory=list)  # variables with several assignments, of which the last was taken
    missing: list[str] = field(default_factory=list)  # files that the script sources and that are not there


def find_command(text: str, programs: Sequence[str], directory: Path) -> ShellCommand:
    """The last command that runs one of ``programs``. ``directory``: the script's, for what it sources.

    Raises ConfigurationError if there is none, or a quote is never closed.
    """
    script = _Script(programs)
    script.read(text, directory)
    if script.command is None:
        raise ConfigurationError(f"no command with one of {', '.join(programs)} was found")
    command = ShellCommand(program=script.program, words=[], missing=script.missing)
    command.words = list(script.expand(script.command, command))
    return command


class _Script:
    def __init__(self, programs: Sequence[str]) -> None:
        self.command: list[str] | None = None
        self.program = ""
        self.missing: list[str] = []
        # Only what follows is split into words: before it may be the end of a quoted text of several lines.
        self._call = re.compile(rf"(?:^|[\s/])({'|'.join(map(re.escape, programs))})(?:\s+(.*))?$")
        self._values: dict[str, list[str] | None] = {}  # variable → its words; None: only the shell knows
        self._times: dict[str, int] = {}  # variable → assignments
        self._open: set[str] = set()  # variables whose values are being put in

    def read(self, text: str, directory: Path) -> None:
        # Without blanks in it, arithmetic is one word.
        lines = iter(_ARITHMETIC.sub(lambda found: re.sub(r"\s", "", found[0]), text.replace("\\\n", " ")).split("\n"))
        for line in lines:
            if self._call_after_assignments(line):
                continue
            if assigned := _ASSIGNMENT.fullmatch(line):
                name, added, opened, value = assigned.groups()
                words = list(_array(value, lines)) if opened else _scalar(value)
                self._assign(name, words, bool(added))
            elif sourced := _SOURCE.match(line):
                self._source(shlex.split(sourced[1])[0], directory)
            else:
                self._take_call(line)

    def _call_after_assignments(self, line: str) -> bool:
        """Take a command that assignments precede, such as ``A=1 python train.py``; False if the line is none."""
        before: list[tuple[str, str]] = []
        while found := _BEFORE.match(line):
            before.append((found[1], found[2].removesuffix(";")))
            line = line[found.end() :]
        if not before or not self._take_call(line):
            return False
        for name, value in before:
            self._assign(name, _scalar(value), added=False)
        return True

    def _take_call(self, line: str) -> bool:
        if (called := self._call.search(without_comment(line))) is None:
            return False
        self.program, self.command = called[1], _split(called[2] or "")
        return True

    def _assign(self, name: str, words: list[str] | None, added: bool) -> None:
        if added:
            words = None if words is None else [*(self._values.get(name) or []), *words]
        else:
            self._times[name] = self._times.get(name, 0) + 1
        self._values[name] = words

    def _source(self, path: str, directory: Path) -> None:
        known = "".join(self.expand([path], ShellCommand(program="", words=[])))
        rest = re.sub(r"^.*\$\w+/|^.*\}/", "", known)  # a variable at its beginning is the script's own directory
        file = directory / rest
        if file.is_file():
            self.read(file.read_text(encoding="utf-8"), file.parent)
        else:
            self.missing.append(rest)

    def expand(self, words: Sequence[str], command: ShellCommand) -> Iterator[str]:
        for given in words:
            word = _ARITHMETIC.sub(lambda found: self._computed(found, command), given)
            array = _ARRAY.fullmatch(word)
            whole = array or _PLAIN.fullmatch(word)
            if whole is None:
                yield _VARIABLE.sub(lambda found: self._value(found, command), word)
                continue
            self._note(whole[1], command)
            values = None if whole[1] in self._open else self._values.get(whole[1])
            if values is not None:
                yield from self._expanded(whole[1], values, command)
            elif array is None:  # a flag's value; of an array only the name is known
                yield word

    def _value(self, found: re.Match[str], command: ShellCommand) -> str:
        name, default = found[1] or found[2], found[3]
        values = None if name in self._open else self._values.get(name)  # A=${A:-1} is 1
        if values is None and default is not None:
            return " ".join(self.expand([default], command))
        self._note(name, command)
        return found[0] if values is None else " ".join(self._expanded(name, values, command))

    def _expanded(self, name: str, values: Sequence[str], command: ShellCommand) -> list[str]:
        self._open.add(name)
        try:
            return list(self.expand(values, command))
        finally:
            self._open.discard(name)

    def _computed(self, found: re.Match[str], command: ShellCommand) -> str:
        """The value of ``$((...))``; itself if a variable in it is unknown."""
        text = re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", found[1])
        known = _VARIABLE.sub(lambda name: self._value(name, command), text)
        try:
            return str(_compute(ast.parse(known, mode="eval").body))
        except (SyntaxError, TypeError, ZeroDivisionError):
            return found[0]

    def _note(self, name: str, command: ShellCommand) -> None:
        if self._values.get(name) is None and name not in command.unknown:
            command.unknown.append(name)
        if self._times.get(name, 0) > 1 and name not in command.repeated:
            command.repeated.append(name)


def _array(first: str, lines: Iterator[str]) -> Iterator[str]:
    """Words up to the closing bracket, which ends a line."""
    line: str | None = first
    while line is not None:
        inner = without_comment(line).rstrip()
        yield from _split(inner.removesuffix(")"))
        if inner.endswith(")"):
            return
        line = next(lines, None)


def _scalar(value: str) -> list[str] | None:
    """Words of a value: several only where it holds flags, as scripts keep them in one variable."""
    if (
        any(mark in _ARITHMETIC.sub("", value) for mark in _ONLY_THE_SHELL_KNOWS)
        or value.count('"') % 2
        or value.count("'") % 2
    ):
        return None
    words = _split(value)
    return [word for part in words for word in (_split(part) if part.startswith("--") else [part])]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(without_comment(line))
    except ValueError as error:
        raise ConfigurationError(f"{error}: {line.strip()!r}") from None


def _compute(node: ast.expr) -> int:
    """Whole numbers with + - * /. Raises TypeError for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return int(_OPERATORS[type(kind)](_compute(left), _compute(right)))
    raise TypeError
