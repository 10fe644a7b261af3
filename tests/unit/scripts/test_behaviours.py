"""The `# covers:` marks in tests/ and the page made of them; ids cited anywhere mean something."""

from __future__ import annotations

import io
import re
import runpy
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Script = dict[str, Any]  # globals of scripts/behaviours.py

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder in ("arguments", "miles_async", "scripts", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
CITED = re.compile(r"(?<![\w/-])[ACMOPR]\d{1,2}(?![\w.])")
Covered = dict[str, list[tuple[str, str]]]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


@pytest.fixture(scope="module")
def script() -> Script:
    return runpy.run_path(str(ROOT / "scripts" / "behaviours.py"))


@pytest.fixture(scope="module")
def meanings(script: Script) -> set[str]:
    families, _ = script["read_meanings"](script["MEANINGS"])
    return {behaviour for family in families for behaviour in family.meanings}


@pytest.fixture(scope="module")
def covered(script: Script) -> Covered:
    return script["covered"](ROOT / "tests")


@pytest.fixture(scope="module")
def at_night(script: Script) -> set[tuple[str, str]]:
    return script["at_night"](ROOT / "tests")


def test_the_page_has_a_section_for_every_behaviour(script: Script, meanings: set[str]) -> None:
    assert set(re.findall(r"^### (\w+)$", script["page"](), re.MULTILINE)) == meanings


def test_every_behaviour_has_a_test_or_a_reason_why_not(script: Script, meanings: set[str], covered: Covered) -> None:
    _, not_yet = script["read_meanings"](script["MEANINGS"])
    tested = set(covered)
    assert tested - meanings == set()
    assert meanings - tested == {behaviour for behaviour, reason in not_yet.items() if reason.startswith("no test")}


def test_every_contract_is_covered_by_make_test(
    script: Script, covered: Covered, at_night: set[tuple[str, str]]
) -> None:
    alone = script["only_at_night"](covered, at_night)
    assert not [behaviour for behaviour in alone if behaviour.startswith("C")]


def cited(path: Path) -> Iterator[str]:
    """Ids in comments, docstrings and messages of a source file."""
    text = path.read_text(encoding="utf-8")
    if not CITED.search(text):
        return  # telling comments from code takes longer
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.type == tokenize.STRING:
            yield from CITED.findall(re.sub(r"noqa: [\w, ]+", "", token.string))


def test_ids_that_sources_cite_have_a_meaning(meanings: set[str]) -> None:
    unknown = {path: ids for path in SOURCES if (ids := set(cited(path)) - meanings)}
    assert not unknown


def test_contracts_of_the_pages_have_a_meaning(meanings: set[str]) -> None:
    for page in PAGES:
        assert set(re.findall(r"\bC\d{1,2}\b", page.read_text())) <= meanings, page


def test_marks_are_read_where_they_stand(script: Script, tmp_path: Path) -> None:
    mark = "# covers" + ":"
    (tmp_path / "test_x.py").write_text(
        f'"""All.\n\n{mark} C1, M10\n"""\n'
        f"def test_a():  {mark} M3\n    pass\n"
        f"async def test_b():\n    {mark} M3, C1\n    pass\n"
        f'class TestC:\n    """{mark} P8"""\n    def test_d(self):\n        {mark} P9\n        pass\n'
    )
    assert script["covered"](tmp_path) == {
        "C1": [("test_x.py", ""), ("test_x.py", "test_b")],
        "M3": [("test_x.py", "test_a"), ("test_x.py", "test_b")],
        "M10": [("test_x.py", "")],
        "P8": [("test_x.py", "TestC")],
        "P9": [("test_x.py", "test_d")],
    }


def test_behaviours_are_told_that_only_long_tests_cover(script: Script, tmp_path: Path) -> None:
    mark = "# covers" + ":"
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e" / "test_x.py").write_text(f"{mark} X1, X2, X3\ndef test_a(): pass\n")
    (tmp_path / "test_y.py").write_text(
        f"@pytest.mark.long\ndef test_b():  {mark} X2, X3\n    pass\ndef test_c():  {mark} X3\n    pass\n"
    )
    (tmp_path / "test_z.py").write_text(f"pytestmark = [pytest.mark.long]\n{mark} X2\nasync def test_d(): pass\n")
    tests, night = script["covered"](tmp_path), script["at_night"](tmp_path)
    assert script["only_at_night"](tests, night) == ["X1", "X2"]
    family = script["Family"]("Letters", "About them.", {"X2": "It holds."})
    page = script["render"]([family], {}, tests, night)
    assert "## Covered at night alone\n\nX1, X2\n" in page
    assert "- `test_y.py`\n  - b, *at night*\n- `test_z.py`, *at night*\n" in page


def test_a_behaviour_is_a_section_with_its_tests_by_file(script: Script) -> None:
    family = script["Family"]("Letters", "About them.", {"X1": "It holds."})
    page = script["render"]([family], {}, {"X1": [("a/test_x.py", ""), ("a/test_x.py", "test_it_is_so")]})
    assert "### X1\n\nIt holds.\n\n- `a/test_x.py`\n  - it is so\n" in page
