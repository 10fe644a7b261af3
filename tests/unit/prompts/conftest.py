"""Both kinds of prompt files, for tests of what they have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["jsonl", "parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where ``row_files.write`` puts rows."""
    return tmp_path / f"p.{request.param}"
