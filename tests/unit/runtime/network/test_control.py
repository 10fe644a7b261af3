"""Commands reach a run through its socket, and hear what it has against them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_async.cli import main
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.control import ControlServer, call
from miles_async.runtime.processes.run_process import MARK, note_run_process


async def scale(group: str, engines: int) -> str:
    if group != "engine":
        raise ConfigurationError(f"there is no group {group}")
    return f"{engines} engines"


async def engines() -> str:
    return "engine-0 serving"


async def test_a_command_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "")  # restored at the end: this process is no run
    path = tmp_path / "control"
    async with ControlServer(path, {"scale": scale, "engines": engines}):
        note_run_process(tmp_path, path)
        for words, code, out, err in (
            (["scale", str(tmp_path)], 0, "engine-0 serving\n", ""),
            (["scale", str(tmp_path), "engine", "3"], 0, "3 engines\n", ""),
            (["scale", str(tmp_path), "other", "3"], 2, "", "error: there is no group other\n"),
            (["scale", str(tmp_path), "engine"], 2, "", "expected GROUP and N, or neither"),
            (["scale", str(tmp_path), "engine", "three"], 2, "", "invalid int value: 'three'"),
        ):
            assert await asyncio.to_thread(main, words) == code
            said = capsys.readouterr()
            assert said.out == out
            assert err in said.err
        with pytest.raises(ConfigurationError, match="knows no command nonsense; it knows scale, engines"):
            await asyncio.to_thread(call, path, "nonsense")
    assert not path.exists()
    assert await asyncio.to_thread(main, ["scale", str(tmp_path)]) == 2
    assert "the run does not answer" in capsys.readouterr().err


async def test_a_socket_that_was_removed_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "control"
    async with ControlServer(path, {"engines": engines}):
        path.unlink()


def test_a_directory_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(tmp_path)]) == 2
    assert "expected a run directory" in capsys.readouterr().err
