"""The parts of the system are separate: none reaches another by any chain of imports, and no imports form a circle.

# covers: R1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from itertools import permutations

import grimp
import pytest

PARTS = ("rollout", "trainer", "staleness", "weights", "engines")


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("miles_async", cache_dir=None)


@pytest.mark.parametrize(("one", "other"), [*permutations(("rollout", "trainer", "weights", "engines"), 2)])
def test_no_part_imports_another(imports: grimp.ImportGraph, one: str, other: str) -> None:
    chain = imports.find_shortest_chains(f"miles_async.{one}", f"miles_async.{other}", as_packages=True)
    assert not chain


@pytest.mark.parametrize("part", PARTS)
def test_the_controller_imports_no_part(imports: grimp.ImportGraph, part: str) -> None:
    assert not imports.find_shortest_chains("miles_async.controller", f"miles_async.{part}", as_packages=True)


def test_no_modules_import_each_other_in_a_circle(imports: grimp.ImportGraph) -> None:
    """Imports for type checkers and within functions count, too."""
    graph: dict[str, set[str]] = defaultdict(set)
    for importer, imported in direct_imports(imports):
        graph[importer].add(imported)
    assert circle(graph) == []


def test_no_packages_import_each_other_in_a_circle(imports: grimp.ImportGraph) -> None:
    """On every level: modules and packages that stand side by side in one package."""
    graph: dict[str, set[str]] = defaultdict(set)
    for importer, imported in direct_imports(imports):
        one, other = importer.split("."), imported.split(".")
        apart = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if apart is not None:  # None: a package and something in it
            graph[".".join(one[: apart + 1])].add(".".join(other[: apart + 1]))
    assert circle(graph) == []


def direct_imports(imports: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    for importer in imports.modules:
        for imported in imports.find_modules_directly_imported_by(importer):
            yield importer, imported


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Modules of which each is imported by the next, the first again at the end; empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
