"""``miles-async set``: its words, and how it reaches the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_async.commands.live_set import set_live
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.control import ControlServer
from miles_async.runtime.processes.run_process import MARK, note_run_process


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of a run whose driver is this process."""
    monkeypatch.setenv(MARK, "mark")
    note_run_process(tmp_path, tmp_path / "control")
    return tmp_path


async def answered(run_dir: Path, *words: str) -> str:
    async def change(changes: dict[str, str]) -> str:
        if "lr" not in changes:
            raise ConfigurationError("no")
        return f"{changes}"

    async def settings() -> str:
        return "lr 1e-06"

    async with ControlServer(run_dir / "control", {"set": change, "settings": settings}):
        return await asyncio.to_thread(set_live, [str(run_dir), *words])


async def test_changes_go_to_the_run_together(run_dir: Path) -> None:
    assert await answered(run_dir, "lr=1e-5", "checkpoint=now") == "{'lr': '1e-5', 'checkpoint': 'now'}\n"


async def test_without_changes_it_lists_the_settings(run_dir: Path) -> None:
    assert await answered(run_dir) == "lr 1e-06\n"


async def test_what_the_run_refuses_is_an_error(run_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^no$"):
        await answered(run_dir, "seed=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr"], "expected NAME=VALUE, found lr"),
        (["lr=1", "lr=2"], "expected one value of lr, found several"),
    ],
)
def test_words_are_checked_before_the_run_is_asked(run_dir: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        set_live([str(run_dir), *words])


def test_a_run_that_is_over_or_elsewhere_is_said(run_dir: Path) -> None:
    record = (run_dir / "run.json").read_text()
    (run_dir / "run.json").write_text(record.replace('"host":"', '"host":"not-'))
    with pytest.raises(ConfigurationError, match="the run was started on not-"):
        set_live([str(run_dir), "lr=1"])
    (run_dir / "run.json").write_text(record.replace('"start_ticks":', '"start_ticks":1'))
    with pytest.raises(ConfigurationError, match="is over"):
        set_live([str(run_dir), "lr=1"])


def test_the_help_names_everything_that_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        set_live(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "max-weight-staleness, max-rollout-lead," in shown
    assert "generation=paused|running, stop=after-step" in shown
