"""The wheels for a GPU machine without network: which, of which versions, and that they are not too large."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_wheels

    return gpu_wheels


def test_wheels_are_of_the_locks_versions_for_the_other_python(script: ModuleType, tmp_path: Path) -> None:
    pins = script.read_pins(script.LOCKS["gpu"])
    command = script.download_command(pins, tmp_path, "3.12")
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[command.index("--python-version") + 1] == "3.12"
    assert [part for part in command if "==" in part] == [pins[name] for name in script.PACKAGES]


def test_more_than_fits_is_an_error(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(command: list[str]) -> SimpleNamespace:
        with (tmp_path / "large-1-py3-none-any.whl").open("wb") as wheel:
            wheel.truncate(65_000_000)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", download)
    assert script.main([str(tmp_path)]) == 1
    assert "expected at most 64 MB, found 65.0" in capsys.readouterr().err
    monkeypatch.setattr(script, "LIMIT_MB", 66)
    assert script.main([str(tmp_path)]) == 0
    assert "1 wheels, 65.0 MB" in capsys.readouterr().out
