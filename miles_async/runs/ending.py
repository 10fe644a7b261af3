"""End a run in order if possible, and clean up after it either way."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from miles_async.arguments.config_file import read_config_file
from miles_async.errors import ConfigurationError, StalledError
from miles_async.runtime.files.owned_directory import sweep_temporary
from miles_async.runtime.files.run_directory import CONFIG_FILE, find_run
from miles_async.runtime.processes.run_process import (
    RunProcess,
    expect_own,
    find_driver,
    find_keeper,
    find_marked,
    kill_marked,
)

STOP_SECONDS = 90.0  # for the driver to end by itself: both sides, Ray, the summary
LEFTOVER_SECONDS = 10.0  # for processes that outlive the driver briefly
POLL_SECONDS = 0.1

Say = Callable[[str], None]


def end_run(run_dir: Path, timeout: float = STOP_SECONDS, say: Say = lambda text: None) -> None:
    """End the run as Ctrl-C would; after ``timeout`` seconds kill its processes. No-op if it is over.

    A run with ``--max-run-restarts`` ends for good, even between two of its lives.

    Raises:
        ConfigurationError: no such run, or it is on another machine or another user's.
        StalledError: a process cannot be ended.
    """
    directory, run = find_run(run_dir)
    if run.host != socket.gethostname():
        raise ConfigurationError(f"{run_dir}: the run was started on {run.host}; stop it there")
    chief = find_keeper(run) or find_driver(run)  # a keeper passes the signal on
    if chief is None:
        say(f"the run in {run_dir} is over")
    else:
        expect_own(chief, run_dir)
        say(f"stopping the run in {run_dir} (process {chief.pid})")
        chief.send_signal(signal.SIGTERM)
        ended = _until(lambda: not _is_live(run), timeout)
        with suppress(ConfigurationError):  # the keeper may have started another life meanwhile
            directory, run = find_run(run_dir)
        if not ended:
            say(f"it did not end within {timeout:g} s; killing its processes")
            _kill(run)
    end_leftovers(run, say)
    sweep_temporary(_staging_directory(directory))


def _is_live(run: RunProcess) -> bool:
    return find_keeper(run) is not None or find_driver(run) is not None


def _kill(run: RunProcess) -> None:
    """Kill the driver, and its keeper if it does not end by itself then."""
    if (driver := find_driver(run)) is not None:
        driver.kill()
    if not _until(lambda: not _is_live(run), LEFTOVER_SECONDS) and (keeper := find_keeper(run)) is not None:
        keeper.kill()


def _staging_directory(run_dir: Path) -> Path | None:
    """The run's ``--weight-staging-dir``; None if it has none, or ended before it wrote its flags."""
    with suppress(ConfigurationError):
        values, _ = read_config_file(run_dir / CONFIG_FILE)
        named = values.get("weight_staging_dir")
        return Path(str(named)) if named is not None else None
    return None


def end_leftovers(run: RunProcess, say: Callable[[str], None]) -> None:
    """Wait for the end of a run's processes, and kill the remaining ones. Raises StalledError if that fails."""
    if _until(lambda: not find_marked(run), LEFTOVER_SECONDS):
        return
    say(f"killing what is left: {', '.join(kill_marked(run))}")
    if not _until(lambda: not find_marked(run), LEFTOVER_SECONDS):
        raise StalledError(f"processes that cannot be killed: {[process.pid for process in find_marked(run)]}")


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return holds
