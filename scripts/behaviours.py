"""Which tests cover which behaviour, from the ``# covers: M3, C8`` marks in tests/; a page of the site (`make docs`).

A mark counts for the test function that it stands in, or on the ``def`` line of; for the tests of a class or of a
file if it stands in that one's docstring, or anywhere outside of a function. scripts/behaviours.toml says what each id
means. To read the page without the site:

    .venv/bin/python scripts/behaviours.py | less
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
MEANINGS = ROOT / "scripts" / "behaviours.toml"
MARK = re.compile(r"\bcovers: (?P<ids>[A-Z]\d+(?:, ?[A-Z]\d+)*)")
HEADER = """\
# What the tests cover

From the `# covers:` marks in tests/ and the meanings in scripts/behaviours.toml. A file without a list stands for all
its tests. `make test` leaves out tests that run *at night*.
"""
NIGHT = ("e2e", "gpu")  # folders that `make test` leaves out
LONG = "pytest.mark.long"


@dataclass(frozen=True)
class Family:
    """The behaviours of one letter."""

    title: str
    about: str
    meanings: Mapping[str, str]  # id → one line, in order of the numbers


def read_meanings(path: Path) -> tuple[list[Family], dict[str, str]]:
    """The families, and the ids that are not or not wholly covered with the reason."""
    content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    not_yet: dict[str, str] = content.pop("not_yet")
    families = []
    for letter, entries in content.items():
        numbers = sorted(int(key) for key in entries if key.isdigit())
        meanings = {f"{letter}{number}": entries[str(number)] for number in numbers}
        families.append(Family(entries["title"], entries["about"], meanings))
    return families, not_yet


def marks(path: Path) -> Iterator[tuple[str, str]]:
    """(behaviour, name of the test or "" for the whole file) of every mark in one file."""
    source = path.read_text(encoding="utf-8")
    if not MARK.search(source):
        return
    scopes = [node for node in ast.walk(ast.parse(source)) if _is_test(node)]
    for number, line in enumerate(source.splitlines(), start=1):
        for mark in MARK.finditer(line):
            inside = [node for node in scopes if node.lineno <= number <= (node.end_lineno or 0)]
            name = max(inside, key=lambda node: node.lineno).name if inside else ""  # the method, not its class
            for behaviour in re.split(r", ?", mark["ids"]):
                yield behaviour, name


def _is_test(node: ast.AST) -> TypeGuard[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    if isinstance(node, ast.ClassDef):
        return True
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def covered(tests: Path) -> dict[str, list[tuple[str, str]]]:
    """Behaviour → (file below ``tests``, name of the test or "" for all its tests), sorted."""
    found: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in sorted(tests.rglob("test_*.py")):
        for behaviour, name in marks(path):
            found[behaviour].add((path.relative_to(tests).as_posix(), name))
    return {behaviour: sorted(found[behaviour]) for behaviour in sorted(found, key=lambda b: (b[0], int(b[1:])))}


def at_night(tests: Path) -> set[tuple[str, str]]:
    """(file below ``tests``, name) of all that `make test` leaves out; (file, "") where that is the whole file."""
    return {
        (path.relative_to(tests).as_posix(), name)
        for path in sorted(tests.rglob("test_*.py"))
        for name in _long_tests(path, everything=path.relative_to(tests).parts[0] in NIGHT)
    }


def _long_tests(path: Path, *, everything: bool) -> set[str]:
    source = path.read_text(encoding="utf-8")
    if not everything and LONG not in source:
        return set()
    tree = ast.parse(source)
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    marks_of_file = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    everything = everything or any(LONG in value for value in marks_of_file)
    found, all_found = set(), True
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_test(node):
            if everything or LONG in map(ast.unparse, node.decorator_list):
                found.add(node.name)
            else:
                all_found = False
    return found | {""} if found and all_found else found


def only_at_night(tests: Mapping[str, Sequence[tuple[str, str]]], night: Set[tuple[str, str]]) -> list[str]:
    """The behaviours of ``tests`` that no test of `make test` covers."""
    return [behaviour for behaviour, found in tests.items() if night >= set(found)]


def render(
    families: Sequence[Family],
    not_yet: Mapping[str, str],
    tests: Mapping[str, Sequence[tuple[str, str]]],
    night: Set[tuple[str, str]] = frozenset(),
) -> str:
    parts = [HEADER, "## Not covered yet\n", *(f"- **{behaviour}**: {reason}" for behaviour, reason in not_yet.items())]
    if alone := only_at_night(tests, night):
        parts.append(f"\n## Covered at night alone\n\n{', '.join(alone)}")
    for family in families:
        parts.append(f"\n## {family.title}\n\n{family.about}")
        for behaviour, meaning in family.meanings.items():
            parts.append(f"\n### {behaviour}\n\n{meaning}\n")
            parts += _listed(tests.get(behaviour, ()), night)
    return "\n".join(parts).rstrip() + "\n"


def _listed(tests: Sequence[tuple[str, str]], night: Set[tuple[str, str]]) -> Iterator[str]:
    for file, entries in groupby(tests, key=lambda test: test[0]):
        yield f"- `{file}`{', *at night*' if (file, '') in night else ''}"
        for test in entries:
            if test[1]:
                yield f"  - {_words(test[1])}{', *at night*' if test in night and (file, '') not in night else ''}"


def _words(name: str) -> str:
    """``test_a_batch_is_cut`` → "a batch is cut"; names of classes as they are."""
    return name.removeprefix("test_").replace("_", " ")


def page() -> str:
    """The whole page."""
    return render(*read_meanings(MEANINGS), covered(TESTS), at_night(TESTS))


if __name__ == "__main__":
    print(page(), end="")
