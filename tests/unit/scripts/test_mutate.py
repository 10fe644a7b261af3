"""Mutation testing: which mutants there are, which tests judge them, and what becomes of a mutant."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # pytest is started several times

ROOT = Path(__file__).resolve().parents[3]
SOURCE = '''\
def first(values: list[int | None], limit: int = 3) -> int:
    """The first value that is small, and not -1."""
    log.info("looking", count=len(values) + 1)
    found = [value for value in values if value is not None and value < limit]
    if not found:
        raise ValueError(f"none of {len(values) - 1} is below {limit + 1}")
    found.sort()
    return min(found) * 2
'''
SLEEPER = b"import time\n\ntime.sleep(100)\n"


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported(monkeypatch)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """This project's imports; building the graph takes seconds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return imported(monkeypatch).import_graph(ROOT)


def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("mutate", "mutants"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import mutate as module

    return module


def test_mutants_change_one_thing_each_and_leave_messages_and_annotations(mutate: ModuleType) -> None:
    source = SOURCE.encode()
    mutants = mutate.find_mutants(source)
    for mutant in mutants:
        ast.parse(mutant.apply(source))
    assert {(mutant.kind, mutant.changed_lines(source)[1]) for mutant in mutants} == {
        ("constant", "def first(values: list[int | None], limit: int = 4) -> int:"),
        ("negated condition", "found = [value for value in values if not (value is not None and value < limit)]"),
        ("boolean operator", "found = [value for value in values if (value is not None or value < limit)]"),
        ("comparison", "found = [value for value in values if value is None and value < limit]"),
        ("comparison", "found = [value for value in values if value is not None and value <= limit]"),
        ("negated condition", "if found:"),
        ("dropped call", "pass"),
        ("opposite call", "return max(found) * 2"),
        ("arithmetic", "return (min(found) + 2)"),
        ("constant", "return min(found) * 3"),
    }


def test_places_are_counted_in_bytes_over_several_lines(mutate: ModuleType) -> None:
    source = 'text = "σ ≤ 3", (1\n  <\n  limit)\nlast = 1\n'.encode()
    comparison = next(mutant for mutant in mutate.find_mutants(source) if mutant.kind == "comparison")
    assert comparison.apply(source).decode() == 'text = "σ ≤ 3", (1 <= limit)\nlast = 1\n'
    assert comparison.line == 1


def test_strict_of_zip_and_conditions_of_types_stay(mutate: ModuleType) -> None:
    source = (
        b"if TYPE_CHECKING:\n    x = 1 + 2\npairs = zip(a, b, strict=True)\n@dataclass(frozen=True)\nclass A: ...\n"
    )
    assert mutate.find_mutants(source) == []


def test_the_nearest_tests_come_first(mutate: ModuleType) -> None:
    graph = {
        "miles_async/staleness/pool.py": set(),
        "miles_async/controller.py": {"miles_async/staleness/pool.py"},
        "tests/property/test_pool.py": {"miles_async/staleness/pool.py"},
        "tests/simulation/test_runs.py": {"miles_async/controller.py"},
        "tests/unit/staleness/test_review.py": {"miles_async/controller.py"},
        "tests/unit/rewards/test_code.py": {"miles_async/controller.py"},
        "tests/integration/test_run.py": {"miles_async/staleness/pool.py"},
    }
    assert mutate.tests_that_import("miles_async/staleness/pool.py", graph) == [
        "tests/property/test_pool.py",
        "tests/simulation/test_runs.py",
        "tests/unit/staleness/test_review.py",
    ]


def test_files_that_a_registry_names_have_the_tests_of_the_registry(
    mutate: ModuleType, graph: dict[str, set[str]]
) -> None:
    for file in ("advantages/estimators.py", "corrections/importance.py", "losses/gspo.py", "token_advantages/gae.py"):
        tests = mutate.tests_that_import(f"miles_async/algorithms/{file}", graph)
        assert "tests/unit/algorithms/test_losses.py" in tests


def test_files_of_a_command_have_the_tests_that_call_it(mutate: ModuleType, graph: dict[str, set[str]]) -> None:
    tests = mutate.tests_that_import("miles_async/commands/migrate/several_flags.py", graph)
    assert "tests/unit/commands/migrate/test_command.py" in tests


def test_every_file_of_the_core_has_tests(mutate: ModuleType, graph: dict[str, set[str]]) -> None:
    files = [file for path in mutate.CORE for file in ([path] if path.endswith(".py") else mutate.python_files(path))]
    without = [file for file in files if not mutate.tests_that_import(file, graph)]
    assert [file for file in without if not file.endswith("/__init__.py")] == []


def test_known_equivalents_are_mutants_of_the_sources_as_they_are(mutate: ModuleType) -> None:
    for (file, *lines), reason in mutate.known_equivalents().items():
        source = (ROOT / file).read_bytes()
        possible = [mutant.changed_lines(source) for mutant in mutate.find_mutants(source)]
        assert tuple(lines) in possible, f"{file} has no such mutant any more: {lines}"
        assert reason


@pytest.fixture
def project(tmp_path: Path, mutate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a source file and a test that checks one part of it."""
    root = tmp_path / "project"
    files = {
        "miles_async/__init__.py": "",
        "miles_async/halves.py": """
            def larger(a, b):
                return max(a, b)

            def untested(a, b):
                return a + b

            def unused(a, b):
                return a * b
            """,
        "tests/unit/test_halves.py": """
            from miles_async.halves import larger

            def test_larger():
                assert larger(1, 2) == 2
            """,
        "scripts/equivalent_mutants.toml": """
            [[mutant]]
            file = "miles_async/halves.py"
            old = "return a * b"
            new = "return (a + b)"
            reason = "nobody calls it"
            """,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(mutate, "ROOT", root)
    monkeypatch.setattr(mutate, "EQUIVALENTS", root / "scripts" / "equivalent_mutants.toml")
    return root


def test_survivors_are_shown_with_their_change_and_fail_the_command(
    mutate: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (project / "miles_async/halves.py").read_text()
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--only", "miles_async"])
    assert mutate.main() == 1
    output = capsys.readouterr().out
    assert "SURVIVED miles_async/halves.py:6 (arithmetic)" in output
    assert "  - return a + b\n  + return (a - b)\n" in output
    assert "killed      miles_async/halves.py:3  opposite call  tests/unit/test_halves.py::test_larger" in output
    assert "equivalent miles_async/halves.py:9 (arithmetic)  nobody calls it" in output
    assert "1 of 2 mutants killed (50%); 1 more are equivalent" in output
    assert (project / "miles_async/halves.py").read_text() == before


@pytest.fixture
def tree(mutate: ModuleType, project: Path, tmp_path: Path) -> Any:
    return mutate.Tree(tmp_path / "tree")


def test_tests_that_fail_without_a_mutant_are_an_error(
    mutate: ModuleType, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "AT_ONCE", 0)
    (tree.root / "tests/unit/test_halves.py").write_text("def test(): assert 0\n")
    with pytest.raises(SystemExit, match="without any mutant the tests must pass"):
        mutate.time_tests(tree, ["tests/unit/test_halves.py"], 0)


def test_a_mutant_that_hangs_is_killed_after_a_while(
    mutate: ModuleType, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "SLACK", 0.5)
    [mutant] = [each for each in mutate.find_mutants(SLEEPER) if each.kind == "constant"]
    (tree.root / "miles_async/halves.py").write_bytes(SLEEPER)
    tests = ["tests/unit/test_halves.py"]
    assert mutate.try_mutant(tree, "miles_async/halves.py", mutant, tests, {tests[0]: 0.0}, 0) == "time"
    assert (tree.root / "miles_async/halves.py").read_bytes() == SLEEPER
