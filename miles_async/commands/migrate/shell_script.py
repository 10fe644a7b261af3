"""Read the command that a shell script would run, without running it: enough of bash for recipes of other systems.

Arrays, assignments, ``source``, arithmetic, ``seq``, comments and continued lines are read; variables are put in where
the script, or who reads it, says their values. Conditions and loops are not followed, and what only the shell can know
stays as it is: both are reported. A value that is given replaces those that the script assigns under a condition or
leaves empty. What other programs would print stands in ``printed.py``.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments.argument_files import outside_quotes, without_comment
from miles_async.commands.migrate.printed import DATE, with_printed, without_printed
from miles_async.errors import ConfigurationError

_ASSIGNMENT = re.compile(r"\s*(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(\(?)(.*)")
_BEFORE = re.compile(r"""\s*(?:export\s+)?(\w+)=((?:[^\s"'(]|"[^"]*"|'[^']*')*)\s+(?:&&\s+)?""")  # A=1 command
_ONE = r"""\w+=(?:\$\(\([^()]*\)\)|"[^"]*"|'[^']*'|[^\s;"'()])*"""
_SEVERAL = re.compile(rf"(\s*{_ONE});\s*(?=\w+=)")  # A=1; B="2"; C=$((A+1))
_ALONE = re.compile(rf"({_ONE})\s*(?=;|$)")  # A=1, and no command that it is for
_READ = re.compile(r"\s*read\s+(?:-\w+\s+)+(\w+)\s*<<<\s*(.*)")
_SOURCE = re.compile(r"\s*(?:source|\.)\s+(\S.*)")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
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
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_SEQUENCE = re.compile(r"\$\(seq\s+([^()]*)\)")
# Brackets in it may be nested three deep, as in $(f $(g $((1)))).
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)|`[^`]*`")
_OF_THE_SYSTEM = ("/etc/", "/opt/", "/usr/")  # files of a compiler or a driver, which set no flags
HOME, _TILDE = "HOME", ["~"]
_HERE = ["."]  # where the script would be started, as is ``miles-async train``
_ELSEWHERE = re.compile(r"^\s*(?:cd|pushd)\s", re.MULTILINE)
_OTHERS = "ARGUMENTS_OF_A_FUNCTION"
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")
_FUNCTION = re.compile(r"\s*(?:function\s+[\w-]+|[\w-]+\s*\(\s*\))")
_NOT_PUT_IN = re.compile(r"\$(?:\{[^}]*\}?|[@*?$!#])")
_ENDS_VALUE = re.compile(r"[;\s]")
_OVERRIDES = re.compile(r"(?:[+~]*[\w.]+=\S*(?:\s+|$))+")  # of Hydra
_BLANK = "\x1f"  # stands for a blank that separates no words
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
# A line of flags or keys by itself: the one before it lacks a backslash at its end.
_CONTINUES = re.compile(r"""\s+(?:--\w|["']?\$\{\w+\[@\]\}|[+~]*\w+\.[\w.]+=)""")
# Begins a line that has only flags or keys: the one before it lacks a backslash at its end.
_CONTINUES = re.compile(r"""\s+(?:--\w|["']?\$\{\w+\[@\]\}|[+~]*\w+\.[\w.]+=)""")
_LAUNCHED = re.compile(r"--(nnodes|nproc[-_]per[-_]node)[= ]+(\S+)")  # of torchrun
_ENDS_COMMAND = re.compile(r"\s(?:\d?>|[|&;])")  # a pipe, a redirection, or another command
# An assignment that does not begin its line.
_BEHIND = re.compile(rf"(&&|\|\||;|\)|\bthen|\belse|\bdo)\s*(?=\w+(?:\+=|=\()|{_ALONE.pattern})")
_BEGINS_BLOCK = re.compile(r"(?:^|;)\s*(?:then|do)\b|^\s*case\s.*\sin\b")
_ENDS_BLOCK = re.compile(r"(?:^|;)\s*(?:fi|done|esac|elif)\b")  # the then of an elif begins the next one
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_ONLY_THE_SHELL_KNOWS = ("$(", "`")
_DESCRIPTION = "model_args_utils.py"  # of miles: prints flags that describe a model, which config.json does here


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
        self._values: dict[str, list[str] | None] = {HOME: _TILDE, "PWD": _HERE, _OTHERS: None}
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
        text = _ARITHMETIC.sub(lambda found: re.sub(r"\s", "", found[0]), text)
        if _ELSEWHERE.search(text) and "PWD" not in self._given:
            self._values["PWD"] = None
        lines = deque(_with_arguments(text.split("\n")))
        while lines:
            line = lines.popleft()
            if first := _SEVERAL.match(line):
                lines.appendleft(line[first.end() :])
                line = first[1]
            if self._call_after_assignments(line):
                self._continue_call(lines)
            elif self._assignment(line, lines, under=self._blocks > 0):
                continue
            elif (sourced := _SOURCE.match(line)) and (path := _split(sourced[1])):
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
        words = list(_array(value, lines)) if opened else _scalar(_to_closing_quote(value, lines))
        replaceable = under or (not opened and words is not None and not any(words))  # under a condition, or empty
        if replaceable and not added and name in self._given and not _refers_to(name, words or [value]):
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
        """``words`` with what the variable holds in place of itself; None if they or it have no such value."""
        held = self._values.get(name)
        if held is None or not _refers_to(name, words):
            return None
        itself = re.compile(rf"\$(?:{name}\b|\{{{name}(?:\[[@*]\]|:?-[^{{}}]*)?\}})")
        done = list[str]()
        for word in words:
            # Flags or overrides, to which others are added, are words by themselves.
            parts = word.split() if len(held) > 1 or _is_several("".join(held)) else [word]
            for part in parts:
                done += held if itself.fullmatch(part) else _several_words(itself.sub(lambda _: " ".join(held), part))
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
        return _several_words(self._given[name])

    def _read(self, name: str, text: str) -> None:
        """Take ``read -ra NAME <<< TEXT``, which splits a text, often another variable's."""
        other = _PLAIN.fullmatch(text.strip().strip('"'))
        self._assign(name, self._values.get(other[1]) if other else _scalar(text), added=False)

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
            self._assign(name, _scalar(value), added=False)
        return True

    def _take_call(self, line: str) -> bool:
        if (called := self._call.search(without_comment(line))) is None:
            return False
        self.program, self.command, self.joined = called[2], _to_its_end(called[3] or ""), []
        before = _LAUNCHED.findall(line[: called.start()])
        self.launched = {flag.replace("_", "-"): value.strip("\"'") for flag, value in before}
        return True

    def _continue_call(self, lines: deque[str]) -> None:
        """Take the words that a missing backslash separates from the command."""
        while self.command is not None and lines and _CONTINUES.match(lines[0]):
            words = _to_its_end(lines.popleft())
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
            if _ARGUMENTS.fullmatch(given):
                continue  # of the script, which has none
            word = _ARITHMETIC.sub(lambda found: self._computed(found, command), given)
            word = self._with_printed(word, command)
            if _is_substituted(word):
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
            return str(_compute(ast.parse(known, mode="eval").body))
        except (SyntaxError, TypeError, ZeroDivisionError):
            return found[0]

    def _substituted(self, word: str, command: ShellCommand) -> Sequence[str]:
        """The numbers of ``$(seq ...)``; what another program would print is unknown, or about the model."""
        if _DESCRIPTION in word:
            command.described += self._open[-1:] or [_DESCRIPTION]
            return []
        if found := _SEQUENCE.fullmatch(word):
            given = [_VARIABLE.sub(lambda name: self._value(name, command), number) for number in found[1].split()]
            if (numbers := _sequence(given)) is not None:
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


def _array(first: str, lines: deque[str]) -> Iterator[str]:
    """Words up to the closing bracket. What follows it becomes the first of ``lines``."""
    lines.appendleft(first)
    while lines:
        inner = without_comment(lines.popleft())
        end = _closing(inner)
        yield from _split(inner[:end])
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


def _to_closing_quote(value: str, lines: deque[str]) -> str:
    """``value`` with those of ``lines`` that its quoted text continues on; without them if nothing closes it."""
    whole = value
    for taken, line in enumerate(["", *lines]):
        whole += f" {line}" if taken else ""
        if not re.search("[\"']", _QUOTED.sub("", without_comment(whole))):
            for _ in range(taken):
                lines.popleft()
            return without_comment(whole)
    return value


def _scalar(value: str) -> list[str] | None:
    """Words of a value: several only where it holds flags, as scripts keep them in one variable."""
    if _DESCRIPTION in value:
        return [f"$({_DESCRIPTION})"]
    if _is_substituted(without_printed(value)) or value.count('"') % 2 or value.count("'") % 2:
        return None
    end = _ENDS_VALUE.search(_masked(_SUBSTITUTION.sub(lambda found: "x" * len(found[0]), value)))
    return [word for part in _split(value[: end.start()] if end else value) for word in _several_words(part)]


def _several_words(value: str) -> list[str]:
    """Words of a variable's value, which are put in without quotes if they are flags or overrides."""
    return _split(value.strip()) if _is_several(value) else [value]


def _is_several(value: str) -> bool:
    """True for flags or overrides, even if it is one."""
    text = value.strip()
    return text.startswith("--") or _OVERRIDES.fullmatch(text) is not None


def _refers_to(name: str, words: Sequence[str]) -> bool:
    return any(re.search(rf"\$\{{?{name}\b", word) for word in words)


def _to_its_end(text: str) -> list[str]:
    """Words of a command, without what follows it."""
    end = _ENDS_COMMAND.search(_masked(text))
    return _split(text[: end.start()] if end else text)


def _masked(text: str) -> str:
    """``text`` with its quoted parts made letters."""
    return _QUOTED.sub(lambda found: "x" * len(found[0]), text)


def _with_arguments(lines: Sequence[str]) -> Iterator[str]:
    """Lines in which a name stands for the arguments of a function, or of ``set --``: the script's own are none."""
    inside = given = False
    for line in lines:
        begins = _FUNCTION.match(line) is not None
        inside = inside or begins
        given = given or re.match(r"\s*set\s+--\s+\S", line) is not None
        yield _ARGUMENTS.sub(f"${{{_OTHERS}[@]}}", line) if inside or given else line
        inside = inside and not line.startswith("}") and not (begins and line.rstrip().endswith("}"))


def _is_substituted(text: str) -> bool:
    """True if another program prints a part of it."""
    return any(mark in _ARITHMETIC.sub("", text) for mark in _ONLY_THE_SHELL_KNOWS)


def _sequence(given: Sequence[str]) -> list[str] | None:
    """Output of ``seq LAST``, ``seq FIRST LAST`` or ``seq FIRST STEP LAST``; None unless all are whole numbers."""
    try:
        numbers = [int(number) for number in given]
        first, step, last = {1: (1, 1, *numbers), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers), numbers)
        return [str(number) for number in range(first, last + (1 if step > 0 else -1), step)]
    except (ValueError, IndexError):  # no number, not one to three, or a step of 0
        return None


def _split(line: str) -> list[str]:
    """Words of a line. A substitution, ``$(...)``, is a part of one word, whatever blanks it has."""
    joined = _SUBSTITUTION.sub(lambda found: re.sub(r"\s", _BLANK, found[0]), without_comment(line))
    try:
        return [word.replace(_BLANK, " ") for word in shlex.split(joined)]
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
