"""Writes tests/behaviours.md: which tests cover which behaviour, from the ``# covers: M3, C8`` marks in tests/.

A mark counts for the test function that it stands in, or on the ``def`` line of; for the tests of a class or of a
file if it stands in that one's docstring, or anywhere outside of a function. From the repository root:

    .venv/bin/python scripts/behaviours.py
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "behaviours.md"
MARK = re.compile(r"\bcovers: (?P<ids>[A-Z]\d+(?:, ?[A-Z]\d+)*)")
HEADER = """\
# What the tests cover

Generated from the `# covers:` marks in tests/ by `.venv/bin/python scripts/behaviours.py`; not edited by hand. A file
without a test's name: its tests together.

C1 to C12 are the contracts of [docs/architecture.md](../docs/architecture.md). The other letters are the systems that a
behaviour is known from: P prime-rl, O open-instruct, R rllm, M miles. Marks of C1 to C11 in tests of engines, processes
and evaluation may instead mean a behaviour known from Claw-R1: the name of the test tells.

| behaviour | tests |
|---|---|
"""


def marks(path: Path) -> Iterator[tuple[str, str]]:
    """(behaviour, name of the test or "" for the whole file) of every mark in one file."""
    source = path.read_text(encoding="utf-8")
    scopes = [node for node in ast.walk(ast.parse(source)) if _is_test(node)]
    for number, line in enumerate(source.splitlines(), start=1):
        for mark in MARK.finditer(line):
            inside = [node for node in scopes if node.lineno <= number <= node.end_lineno]
            # Of a method and its class, the method.
            name = max(inside, key=lambda node: node.lineno).name if inside else ""
            for behaviour in re.split(r", ?", mark["ids"]):
                yield behaviour, name


def _is_test(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return True
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def covered(tests: Path) -> dict[str, list[str]]:
    """Behaviour → tests as "unit/test_x.py::test_y", sorted; behaviours in order of letter and number."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(tests.rglob("test_*.py")):
        for behaviour, name in marks(path):
            where = path.relative_to(tests).as_posix()
            found[behaviour].add(f"{where}::{name}" if name else where)
    return {behaviour: sorted(found[behaviour]) for behaviour in sorted(found, key=lambda b: (b[0], int(b[1:])))}


def render(table: dict[str, list[str]]) -> str:
    """The page."""
    rows = (f"| {behaviour} | {'<br>'.join(f'`{test}`' for test in tests)} |\n" for behaviour, tests in table.items())
    return HEADER + "".join(rows)


if __name__ == "__main__":
    TABLE.write_text(render(covered(ROOT / "tests")), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}")
