"""Read the command that a shell script would run, without running it: enough of bash for recipes of other systems.

Arrays, assignments, ``source``, arithmetic, ``seq``, comments and continued lines are read; variables are put in where
the script, or who reads it, says their values. Conditions and loops are not followed, and what only the shell can know
stays as it is: both are reported. A value that is given replaces those that the script assigns under a condition or
leaves empty. What other programs would print stands in ``printed.py``, what a word is in ``shell_words.py``.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments.argument_files import without_comment
from miles_async.commands.migrate.printed import DATE, with_printed
from miles_async.commands.migrate.shell_words import (
    ARGUMENTS,
    ARITHMETIC,
    DESCRIPTION,
    OTHERS,
    array_words,
    compute,
    is_several,
    is_substituted,
    refers_to,
    scalar,
    sequence,
    several_words,
    split,
    to_closing_quote,
    to_its_end,
    value_and_rest,
    with_arguments,
)
from miles_async.errors import ConfigurationError

_ASSIGNMENT = re.compile(r"\s*(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(\(?)(.*)")
_BEFORE = re.compile(r"""\s*(?:export\s+)?(\w+)=((?:[^\s"'(]|"[^"]*"|'[^']*')*)\s+(?:&&\s+)?""")  # A=1 command
_ONE = r"""\w+=(?:\$\(\([^()]*\)\)|"[^"]*"|'[^']*'|[^\s;"'()])*"""
_SEVERAL = re.compile(rf"(\s*{_ONE});\s*(?=\w+=)")  # A=1; B="2"; C=$((A+1))
_ALONE = re.compile(rf"({_ONE})\s*(?=;|$)")  # A=1, and no command that it is for
_ONE_BEGINS = re.compile(r"\w+=")
_SEPARATORS = (";", "&", "|", "<", ">", ")")  # of commands and redirections
_READ = re.compile(r"\s*read\s+(?:-\w+\s+)+(\w+)\s*<<<\s*(.*)")
_SOURCE = re.compile(r"\s*(?:source|\.)\s+(\S.*)")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_EMPTY_BY_DEFAULT = re.compile(r"\$\{(\w+):?-\}")
NEVER_SET = "EMPTY_TEXT"  # a variable of no script
_PLAIN = re.compile(r"\$\{?(\w+)\}?")
# $A, ${A}, ${A:-text} and the like, ${A,,}; text may hold two more, each within the other.
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:(:?)([-+])((?:[^{}]|\$\{(?:[^{}]|\$\{[^{}]*\})*\})*)|(,,?|\^\^?))?\}")
_REQUIRED = re.compile(r"\$\{(\w+):?\?[^{}]*\}")  # ${A:?message}
_IN_CASE = {
    ",": lambda text: text[:1].lower() + text[1:],
    "^": lambda text: text[:1].upper() + text[1:],
    ",,": str.lower,
    "^^": str.upper,
}
_SEQUENCE = re.compile(r"\$\(seq\s+([^()]*)\)")
_OF_THE_SYSTEM = ("/etc/", "/opt/", "/usr/")  # files of a compiler or a driver, which set no flags
HOME, _TILDE = "HOME", ["~"]
_HERE = ["."]  # where the script would be started, as is ``miles-async train``
_ELSEWHERE = re.compile(r"^\s*(?:cd|pushd)\s", re.MULTILINE)
_NOT_PUT_IN = re.compile(r"\$(?:\{[^}]*\}?|[@*?$!#])")
# Begins a line of flags or keys only: the line before lacks a backslash at its end.
_CONTINUES = re.compile(r"""\s+(?:--\w|["']?\$\{\w+\[@\]\}|[+~]*\w+\.[\w.]+=)""")
_LAUNCHED = re.compile(r"--(nnodes|nproc[-_]per[-_]node)[= ]+(\S+)")  # of torchrun
# An assignment that does not begin its line.
_BEHIND = re.compile(rf"(&&|\|\||;|\)|\bthen|\belse|\bdo)\s*(?=\w+(?:\+=|=\()|{_ALONE.pattern})")
_BEGINS_BLOCK = re.compile(r"(?:^|;)\s*(?:then|do)\b|^\s*case\s.*\sin\b")
_ENDS_BLOCK = re.compile(r"(?:^|;)\s*(?:fi|done|esac|elif)\b")  # the then of an elif begins the next one


@dataclass(kw_only=True, slots=True)
class ShellCommand:
    """A program's arguments, and doubts about them."""

    program: str  # the last part of its path
    words: list[str]
    launched: dict[str, str] = field(default_factory=dict)  # flag of torchrun → value: nnodes, nproc-per-node
    # Variables and substitutions that stand in words as they are; HOME, for which they have a ~; arrays, whose words
    # are missing.
    unknown: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # variables with several assignments, of which the last was taken
    conditional: list[str] = field(default_factory=list)  # variables that were set, or added to, under a condition
    described: list[str] = field(default_factory=list)  # variables whose flags describe the model
    missing: list[str] = field(default_factory=list)  # files that the script sources and that are not there
    joined: list[str] = field(default_factory=list)  # first words of lines that a backslash should join to the command
    dated: list[str] = field(default_factory=list)  # values with the time of reading in them


def find_command(
    text: str, programs: Sequence[str], directory: Path, given: Mapping[str, str] | None = None
) -> ShellCommand:
    """The last command that runs one of ``programs``. ``directory``: the script's, for what it sources.

    ``given``: variable → its value, where the script does not say it, says it under a condition or leaves it empty.
    Raises ConfigurationError if there is no command, it does not depend on a given variable, or a quote is never
    closed.
    """
    script = _Script(programs, given or {})
    script.read(text, directory)
    if script.command is None:
        raise ConfigurationError(f"no command with one of {', '.join(programs)} was found")
    command = ShellCommand(program=script.program, words=[], missing=script.missing, joined=script.joined)
    command.words = list(script.expand(script.command, command))
    command.launched = {flag: "".join(script.expand([value], command)) for flag, value in script.launched.items()}
    if unused := script.unused():
        raise ConfigurationError(
            f"{unused[0]} has no effect: the command does not depend on ${unused[0]}, or the script sets it itself, "
            "under no condition"
        )
    return command


class _Script:
    def __init__(self, programs: Sequence[str], given: Mapping[str, str]) -> None:
        self.command: list[str] | None = None
        self.program = ""
        self.joined: list[str] = []
        self.launched: dict[str, str] = {}
        self.missing: list[str] = []
        # Only what follows is split into words: before it may be the end of a quoted text of several lines.
        self._call = re.compile(rf"(?:^|\s)([\"']?)(?:\S*/)?({'|'.join(map(re.escape, programs))})\1(?:\s+(.*))?$")
        # Variable → its words; None: only the shell knows.
        self._values: dict[str, list[str] | None] = {HOME: _TILDE, "PWD": _HERE, OTHERS: None}
        self._given = dict(given)
        for name in given:
            self._values.pop(name, None)
        self._used: set[str] = set()  # given variables that were put in
        self._times: dict[str, int] = {}  # variable → assignments
        self._blocks = 0  # conditions and loops that are open
        self._conditional: set[str] = set()  # variables whose words depend on one
        self._open: list[str] = []  # variables whose values are being put in, each in the one before it

    def read(self, text: str, directory: Path) -> None:
        text = _REQUIRED.sub(r"${\1}", text.replace("\\\n", " "))
        # Without blanks in it, arithmetic is one word.
        text = ARITHMETIC.sub(lambda found: re.sub(r"\s", "", found[0]), text)
        if _ELSEWHERE.search(text) and "PWD" not in self._given:
            self._values["PWD"] = None
        lines = deque(with_arguments(text.split("\n")))
        while lines:
            line = lines.popleft()
            if first := _SEVERAL.match(line):
                lines.appendleft(line[first.end() :])
                line = first[1]
            if self._call_after_assignments(line):
                self._continue_call(lines)
            elif self._assignment(line, lines, under=self._blocks > 0):
                continue
            elif (sourced := _SOURCE.match(line)) and (path := split(sourced[1])):
                self._source(path[0], directory)
            elif found := _READ.match(line):
                self._read(found[1], found[2])
            elif behind := _BEHIND.search(code := without_comment(line)):
                self._count_blocks(code[: behind.end()])
                condition = self._blocks > 0 or behind[1] in ("&&", "||")
                rest = line[behind.end() :]
                if alone := _ALONE.match(code, behind.end()):
                    lines.appendleft(code[alone.end() :])
                    rest = alone[1]
                self._assignment(rest, lines, under=condition)
            else:
                self._count_blocks(code)
                if self._take_call(line):
                    self._continue_call(lines)

    def _assignment(self, line: str, lines: deque[str], *, under: bool) -> bool:
        """Take an assignment, with those ``lines`` that its array goes on in; False if the line is none.

        ``under``: a condition or a loop decides whether and how often it happens.
        """
        if (assigned := _ASSIGNMENT.fullmatch(line)) is None:
            return False
        name, added, opened, value = assigned.groups()
        if opened:
            words: list[str] | None = list(array_words(value, lines))
        else:
            value = to_closing_quote(value, lines)
            words, (_, rest) = scalar(value), value_and_rest(value)
            is_builtin = bool(line[: assigned.start(1)].strip())  # such as export
            if words is not None and rest and not is_builtin and not rest.startswith(_SEPARATORS):
                return False  # it applies to one command
            if rest.startswith(_SEPARATORS):
                lines.appendleft(rest.replace("&&", ";", 1) if rest.startswith("&&") else rest)
            elif is_builtin and _ONE_BEGINS.match(rest):
                lines.appendleft(f"export {rest}")
        replaceable = under or (not opened and words is not None and not any(words))  # under a condition, or empty
        if replaceable and not added and name in self._given and not refers_to(name, words or [value]):
            self._values[name] = None
            return True
        extended = None if added or words is None else self._extended(name, words)
        if extended is None and not added:
            self._conditional.discard(name)  # what it held before is gone
        if under and (extended or added or name not in self._times):
            self._conditional.add(name)
        if extended is None:
            self._assign(name, words, bool(added))
        else:
            self._values[name] = extended
        return True

    def _extended(self, name: str, words: Sequence[str]) -> list[str] | None:
        """``words`` with the variable's current value in place of references to itself; None without such a value or
        reference.
        """
        held = self._values.get(name)
        if held is None or not refers_to(name, words):
            return None
        itself = re.compile(rf"\$(?:{name}\b|\{{{name}(?:\[[@*]\]|:?-[^{{}}]*)?\}})")
        empty = _EMPTY_BY_DEFAULT.fullmatch("".join(held) or f"${{{NEVER_SET}:-}}")
        if empty and empty[1] == name:  # its value comes from outside the script, or is a default
            return None
        if empty:  # then ${A:-default} takes its default
            words = [re.sub(rf"\$\{{{name}:-", f"${{{empty[1]}:-", word) for word in words]
        done = list[str]()
        for word in words:
            # Flags or overrides, to which others are added, are words by themselves.
            parts = word.split() if len(held) > 1 or is_several("".join(held)) else [word]
            for part in parts:
                done += held if itself.fullmatch(part) else several_words(itself.sub(lambda _: " ".join(held), part))
        return done

    def unused(self) -> list[str]:
        """Variables that were given and put in nowhere."""
        return [name for name in self._given if name not in self._used]

    def _known(self, name: str) -> list[str] | None:
        """Words of a variable. The script's count, but A=${A:-1}, what only the shell knows and what is assigned under
        a condition take the given ones.
        """
        own = None if name in self._open else self._values.get(name)
        if own is not None or name not in self._given:
            return own
        self._used.add(name)
        return several_words(self._given[name])

    def _read(self, name: str, text: str) -> None:
        """Take ``read -ra NAME <<< TEXT``, which splits a text, often another variable's."""
        other = _PLAIN.fullmatch(text.strip().strip('"'))
        self._assign(name, self._values.get(other[1]) if other else scalar(text), added=False)

    def _count_blocks(self, code: str) -> None:
        begun, ended = len(_BEGINS_BLOCK.findall(code)), len(_ENDS_BLOCK.findall(code))
        self._blocks = max(0, self._blocks + begun - ended)

    def _call_after_assignments(self, line: str) -> bool:
        """Take a command that assignments precede, such as ``A=1 python train.py``; False if the line is none."""
        before: list[tuple[str, str]] = []
        while found := _BEFORE.match(line):
            before.append((found[1], found[2].removesuffix(";")))
            line = line[found.end() :]
        if not before or not self._take_call(line):
            return False
        for name, value in before:
            self._assign(name, scalar(value), added=False)
        return True

    def _take_call(self, line: str) -> bool:
        if (called := self._call.search(without_comment(line))) is None:
            return False
        self.program, self.command, self.joined = called[2], to_its_end(called[3] or ""), []
        before = _LAUNCHED.findall(line[: called.start()])
        self.launched = {flag.replace("_", "-"): value.strip("\"'") for flag, value in before}
        return True

    def _continue_call(self, lines: deque[str]) -> None:
        """Take the words that a missing backslash separates from the command."""
        while self.command is not None and lines and _CONTINUES.match(lines[0]):
            words = to_its_end(lines.popleft())
            self.command += words
            self.joined += words[:1]

    def _assign(self, name: str, words: list[str] | None, added: bool) -> None:
        if added:
            words = None if words is None else [*(self._values.get(name) or []), *words]
        else:
            self._times[name] = self._times.get(name, 0) + 1
        self._values[name] = words

    def _source(self, path: str, directory: Path) -> None:
        known = "".join(self.expand([path], ShellCommand(program="", words=[])))
        rest = re.sub(r"^.*(?:\$\w+|[})])/", "", known)  # a variable at its beginning is the script's own directory
        file = next(filter(Path.is_file, places(rest, directory)), None)
        if file is not None:
            self.read(file.read_text(encoding="utf-8"), file.parent)
        elif not rest.startswith(_OF_THE_SYSTEM):
            self.missing.append(rest)

    def expand(self, words: Sequence[str], command: ShellCommand) -> Iterator[str]:
        for given in words:
            if ARGUMENTS.fullmatch(given):
                continue  # of the script, which has none
            word = ARITHMETIC.sub(lambda found: self._computed(found, command), given)
            word = self._with_printed(word, command)
            if is_substituted(word):
                yield from self._substituted(word, command)
                continue
            array = _ARRAY.fullmatch(word)
            whole = array or _PLAIN.fullmatch(word)
            if whole is None:
                left = _NOT_PUT_IN.findall(_VARIABLE.sub("", word))
                command.unknown += [part for part in left if part not in command.unknown]
                yield _VARIABLE.sub(lambda found: self._value(found, command), word)
                continue
            if array and whole[1] not in {*self._values, *self._given} and not self.missing:
                continue  # nobody fills it, and the environment has no arrays
            self._note(whole[1], command)
            values = self._known(whole[1])
            if values is not None:
                yield from self._expanded(whole[1], values, command)
            elif array is None:  # a flag's value; the words of an array are missing
                yield word

    def _value(self, found: re.Match[str], command: ShellCommand) -> str:
        name, colon, operator, text, case = found[1] or found[2], *found.groups()[2:]
        values = self._known(name)
        known = None if values is None else " ".join(self._expanded(name, values, command))
        if operator == "-" and (known is None or (colon and not known)):
            return " ".join(self.expand([text], command))
        self._note(name, command)
        if known is None:
            return found[0]
        if operator == "+":
            return " ".join(self.expand([text], command)) if known or not colon else ""
        return _IN_CASE[case](known) if case else known

    def _expanded(self, name: str, values: Sequence[str], command: ShellCommand) -> list[str]:
        self._open.append(name)
        try:
            return list(self.expand(values, command))
        finally:
            self._open.pop()

    def _computed(self, found: re.Match[str], command: ShellCommand) -> str:
        """The value of ``$((...))``; itself if a variable in it is unknown."""
        text = re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", found[1])
        known = _VARIABLE.sub(lambda name: self._value(name, command), text)
        try:
            return str(compute(ast.parse(known, mode="eval").body))
        except (SyntaxError, TypeError, ZeroDivisionError):
            return found[0]

    def _substituted(self, word: str, command: ShellCommand) -> Sequence[str]:
        """The numbers of ``$(seq ...)``; what another program would print is unknown, or about the model."""
        if DESCRIPTION in word:
            command.described += self._open[-1:] or [DESCRIPTION]
            return []
        if found := _SEQUENCE.fullmatch(word):
            given = [_VARIABLE.sub(lambda name: self._value(name, command), number) for number in found[1].split()]
            if (numbers := sequence(given)) is not None:
                return numbers
        if word not in command.unknown:
            command.unknown.append(word)
        return [word]

    def _with_printed(self, word: str, command: ShellCommand) -> str:
        """``word`` with what some programs would print in place of their calls."""
        if DATE.search(word):
            command.dated += [name for name in self._open[-1:] or [word] if name not in command.dated]
        return with_printed(word, lambda part: " ".join(self.expand([part], command)))

    def _note(self, name: str, command: ShellCommand) -> None:
        is_unknown = self._values.get(name) in (None, _TILDE) and name not in self._given
        if is_unknown and name not in command.unknown:
            command.unknown.append(name)
        if self._times.get(name, 0) > 1 and name not in command.repeated:
            command.repeated.append(name)
        if name in self._conditional and name not in command.conditional:
            command.conditional.append(name)


def places(path: str, directory: Path) -> Iterator[Path]:
    """Where a script's file may be: as written, or elsewhere in the checkout that ``directory`` is a part of."""
    yield directory / path
    parts = Path(path).parts
    for parent in (directory, *directory.absolute().parents):
        yield from (parent.joinpath(*parts[first:]) for first in range(1, len(parts) - 1))
        yield parent / path
