"""docs/migrate.md is what the table of other systems' flags says."""

from __future__ import annotations

from miles_async.arguments.foreign import FOREIGN_FLAGS
from scripts.migrate_page import PAGE, page


def test_the_page_is_current() -> None:
    # covers: P8
    assert PAGE.read_text() == page(), "run .venv/bin/python scripts/migrate_page.py"


def test_every_flag_is_on_it() -> None:
    table = "".join(line for line in page().splitlines() if line.startswith("| `"))
    assert [flag for flag in FOREIGN_FLAGS if f"`{flag}`" not in table] == []
