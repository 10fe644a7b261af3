"""Free memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.runtime import memory


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    unlimited = memory.free_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() > unlimited / 2
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\nfile 1600000\ninactive_file 1000000\nactive_file 500000\n")
    assert memory.free_memory() == 2000000  # without what files' pages take
