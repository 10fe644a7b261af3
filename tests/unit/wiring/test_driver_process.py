"""The end of a run as a command: its first error surfaces, and its summary says what was done."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from miles_async.arguments import Arguments, ClusterArguments, ModelArguments, ObservabilityArguments
from miles_async.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    MilesAsyncError,
    ProcessLostError,
    StalledError,
    SummaryError,
    TrainerError,
)
from miles_async.observability.heartbeat import heartbeat
from miles_async.runtime.processes.fork_server_process import ForkServers
from miles_async.runtime.processes.run_process import MARK
from miles_async.wiring import driver, report
from miles_async.wiring import driver_process as train

# covers: C10

pytestmark = pytest.mark.usefixtures("restored_logging")

NO_IMPORTS = cast(ForkServers, None)  # nothing is started


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arguments:
    monkeypatch.setenv(MARK, "")  # restored at the end: this process is no run
    return Arguments(
        cluster=ClusterArguments(device="cpu"),
        model=ModelArguments(hf_checkpoint=tmp_path / "model"),
        observability=ObservabilityArguments(run_dir=tmp_path / "run"),
    )


def ends_with(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """Have every run end at once, in this way."""

    async def main(self: train.Run, all_is_up: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(train.Run, "main", main)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "interrupted"),
        (TrainerError("x"), "failed"),
        (ProcessLostError("x"), "lost"),
        (StalledError("x"), "stalled"),
    ],
)
def test_the_summary_says_how_it_ended(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, ending: str
) -> None:
    ends_with(monkeypatch, error)
    if isinstance(error, MilesAsyncError):
        with pytest.raises(type(error)):
            train.run(arguments, NO_IMPORTS)
    else:
        assert train.run(arguments, NO_IMPORTS) == {"finished": 0, "interrupted": 130}[ending]
    summary = json.loads((arguments.observability.run_dir / "summary.json").read_text())
    assert summary["ending"] == ending


def test_a_summary_that_cannot_be_written_is_an_error_that_hides_no_other(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_summary", full_disk)
    ends_with(monkeypatch, None)
    with pytest.raises(SummaryError, match=r"the run has finished, and its summary cannot be written: .*No space left"):
        train.run(arguments, NO_IMPORTS)
    ends_with(monkeypatch, KeyboardInterrupt())
    assert train.run(arguments, NO_IMPORTS) == EXIT_INTERRUPTED
    ends_with(monkeypatch, TrainerError("rank 1 died"))
    with pytest.raises(TrainerError, match="rank 1 died"):
        train.run(arguments, NO_IMPORTS)


def test_a_plot_that_cannot_be_drawn_costs_nothing(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(monkeypatch, None)
    monkeypatch.setattr(report, "plot_run", full_disk)
    monkeypatch.setattr(report.RunSummary, "finish", lambda *_, **__: {"steps": 3, "reward_first": 0.5})
    printed: list[object] = []
    monkeypatch.setattr(report, "print_summary", lambda *_, **__: printed.append("table"))
    assert train.run(arguments, NO_IMPORTS) == 0
    assert printed == ["table"]


def test_a_directory_that_cannot_be_written_is_named(arguments: Arguments, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = replace(arguments, observability=ObservabilityArguments(run_dir=tmp_path / "file" / "run"))
    with pytest.raises(ConfigurationError, match=f"--run-dir {tmp_path / 'file' / 'run'}: "):
        train.run(below, NO_IMPORTS)


def test_a_last_resort_ends_the_process_even_without_a_run_directory(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class EndedError(BaseException):
        pass

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr("os._exit", end)
    run = train.Run(arguments, NO_IMPORTS, tmp_path / "removed", tmp_path / "control")
    with pytest.raises(EndedError) as ended:
        run.end_at_once(False, "Ray has ended")
    assert ended.value.args == (EXIT_FAILED,)


def test_a_directory_for_temporary_files_that_cannot_be_written_is_named(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(train, "temporary_parent", lambda: tmp_path / "file" / "tmp")
    with pytest.raises(ConfigurationError, match=rf"temporary files \(TMPDIR\): .*{tmp_path / 'file' / 'tmp'}"):
        train.run(arguments, NO_IMPORTS)


async def test_a_run_without_a_step_says_what_it_does(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def slow(*_: object) -> AsyncIterator[None]:
        printed = ""
        async with asyncio.timeout(20):
            while "still starting Ray after 0:00" not in printed:
                await asyncio.sleep(0.01)
                printed += capsys.readouterr().out
        raise TrainerError("enough was said")
        yield

    async def nothing() -> None: ...

    monkeypatch.setattr(driver, "heartbeat", partial(heartbeat, seconds=0.02))
    monkeypatch.setattr(driver, "fork_servers", lambda *_: None)
    monkeypatch.setattr(driver, "ray_cluster", slow)
    imports = cast(ForkServers, SimpleNamespace(fork=lambda _: None, stop=nothing))
    with pytest.raises(TrainerError, match="enough was said"):
        await driver.Run(arguments, imports, tmp_path / "run", tmp_path).main(lambda: None)


async def test_a_run_without_engines_says_so_where_health_checks_ask() -> None:
    assert await driver._commands(None, None)["engines"]() == "this run has no engines"
