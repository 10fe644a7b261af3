"""Read a Dockerfile: its stages, and each instruction with the arguments that a build gives it.

What docker/ uses is understood, everything else is refused, so that nothing is passed over in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KNOWN = (
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "RUN",
    "SHELL",
    "USER",
    "WORKDIR",
)
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_FROM = re.compile(r"(\S+)(?: AS ([\w-]+))?")
_FLAG = re.compile(r"--([\w-]+)(?:=(\S+))?\s+")


class DockerfileError(Exception):
    """The file says something that is not understood here; the message names the line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; continued lines are joined, comments left out."""

    line: int  # where it begins
    name: str
    rest: str

    @property
    def flags(self) -> dict[str, str]:
        """``--chown=miles`` and the like, which stand before the other words."""
        return {name: value for name, value in _FLAG.findall(self.rest[: self._flags_end])}

    @property
    def words(self) -> str:
        return self.rest[self._flags_end :]

    @property
    def _flags_end(self) -> int:
        flags = _FLAGS.match(self.rest)
        return flags.end() if flags else 0

    @property
    def command(self) -> list[str]:
        """The words of the form that needs no shell: ["tini", "--"]."""
        try:
            return json.loads(self.words)
        except ValueError:
            raise DockerfileError(
                f"line {self.line}: expected {self.name} with a list as JSON, found {self.rest}"
            ) from None

    def assignments(self, values: Mapping[str, str]) -> dict[str, str]:
        """``A=1 B=${C}`` with ``values`` in place of variables."""
        return {name: expand(value, values) for name, _, value in (word.partition("=") for word in self.words.split())}


_FLAGS = re.compile(rf"(?:{_FLAG.pattern})*")


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and the instructions up to the next."""

    name: str  # "" if it has none
    base: str  # another stage or an image, with variables
    line: int
    steps: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    arguments: tuple[Instruction, ...]  # ARG before the first FROM: for FROM alone
    stages: tuple[Stage, ...]

    @property
    def instructions(self) -> list[Instruction]:
        return [*self.arguments, *(step for stage in self.stages for step in stage.steps)]

    def chain(self, target: str, values: Mapping[str, str]) -> tuple[str, list[Stage]]:
        """The image below ``target``, and the stages from there to it."""
        names = {stage.name: stage for stage in self.stages}
        found: list[Stage] = []
        base = target
        while base in names:
            found.insert(0, names.pop(base))
            base = expand(found[0].base, values)
        if not found:
            raise DockerfileError(f"expected a stage {target}, found {', '.join(filter(None, names))}")
        return base, found


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ${NAME}. In RUN the shell does that, which knows more forms."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise DockerfileError(f"expected a value for {found[0]}, found {', '.join(sorted(values)) or 'none'}")
        return values[found[1]]

    return _VARIABLE.sub(value, text)


def read(path: Path) -> Dockerfile:
    before: list[Instruction] = []
    stages: list[Stage] = []
    for each in _instructions(path.read_text().splitlines()):
        if each.name not in KNOWN:
            raise DockerfileError(
                f"{path.name} line {each.line}: expected one of {', '.join(KNOWN)}, found {each.name}"
            )
        if each.name == "FROM":
            found = _FROM.fullmatch(each.rest)
            if found is None:
                raise DockerfileError(f"{path.name} line {each.line}: expected FROM image [AS name], found {each.rest}")
            stages.append(Stage(found[2] or "", found[1], each.line, ()))
        elif stages:
            last = stages[-1]
            stages[-1] = Stage(last.name, last.base, last.line, (*last.steps, each))
        elif each.name == "ARG":
            before.append(each)
        else:
            raise DockerfileError(f"{path.name} line {each.line}: expected ARG or FROM first, found {each.name}")
    return Dockerfile(tuple(before), tuple(stages))


def _instructions(lines: Sequence[str]) -> Iterator[Instruction]:
    parts: list[str] = []
    begin = 0
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        begin = begin if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            name, _, rest = " ".join(parts).partition(" ")
            yield Instruction(begin, name, rest.strip())
            parts = []
    if parts:
        raise DockerfileError(f"line {begin}: expected another line after the last backslash, found the end")


class Context:
    """The files that a build is given: the tree without what .dockerignore leaves out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        lines = (line.strip() for line in (root / ".dockerignore").read_text().splitlines())
        self._rules = [
            (line.startswith("!"), _pattern(line.lstrip("!"))) for line in lines if line and not line.startswith("#")
        ]

    def holds(self, path: str) -> bool:
        """Whether this file, relative to the root, is sent: the last rule that matches it or a folder above decides."""
        parts = path.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        sent = True
        for exception, pattern in self._rules:
            if any(pattern.fullmatch(each) for each in above):
                sent = exception
        return sent

    def files(self, source: str) -> list[str]:
        """Files below ``source``, or itself; links to folders are followed by nobody."""
        path = self.root / source
        if path.is_file():
            found = [source]
        else:
            found = [
                str(each.relative_to(self.root)) for each in path.rglob("*") if each.is_symlink() or each.is_file()
            ]
        if kept := sorted(name for name in found if self.holds(name)):
            return kept
        raise DockerfileError(f"COPY {source}: expected files in the tree that .dockerignore lets through, found none")


def _pattern(text: str) -> re.Pattern[str]:
    shell = re.escape(text.strip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
    return re.compile(shell)
