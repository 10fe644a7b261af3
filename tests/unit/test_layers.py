"""The parts of the system are separate: none reaches another by any chain of imports.

# covers: R1
"""

from __future__ import annotations

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
