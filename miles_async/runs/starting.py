"""Start a run in a separate process, as the command line does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from miles_async.errors import EXIT_CONFIGURATION, ConfigurationError, MilesAsyncError
from miles_async.runs.carried import Carried, by_argument, carry
from miles_async.runs.config import Config, expect_config
from miles_async.runs.run import Run
from miles_async.runtime.files.run_directory import (
    CODE_DIRECTORY,
    CONSOLE_FILE,
    check_run_directory,
    move_aside,
    owner_of,
)

POLL_SECONDS = 0.05
INTERRUPT_SECONDS = 30.0


def train_command(words: Sequence[str]) -> list[str]:
    """The command of ``miles-async train``, for a separate process."""
    return [sys.executable, "-m", "miles_async", "train", *words]


def start(
    config: Config,
    *,
    reward: object = None,
    environment: object = None,
    agent: object = None,
    generate: object = None,
    group_reward: object = None,
    group_filter: object = None,
) -> Run:
    """Start a run; return once its checks have passed and it has its run directory.

    It runs until it is done or stopped, whatever happens to this process; its output is in console.log of the run
    directory. Hooks are functions, classes or objects as docs/extending/ describes them, or ``module:attr``.

    Raises:
        ConfigurationError: the flags, model, data or hooks cannot work, or a hook cannot be carried.
        MilesAsyncError: the run ended before it had its directory.

    >>> run = start(Config.from_args(["@examples/quickstart/reverse.args"]), reward=digits_right)
    """
    expect_config(config)
    hooks = {
        "reward": reward,
        "environment": environment,
        "agent": agent,
        "generate": generate,
        "group_reward": group_reward,
        "group_filter": group_filter,
    }
    carried = carry(hooks)
    config = config.having(*carried.words)
    run_dir = config.directory / config.arguments.observability.run_dir
    with _written(carried, run_dir):
        before = owner_of(run_dir)
        with _console(run_dir) as console, console.open("wb") as output:
            process = subprocess.Popen(
                train_command(config.words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=config.directory,
                start_new_session=True,  # signals for a notebook's kernel or a terminal's programs are not for it
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_module_path(run_dir))},
            )
            _wait_for_directory(process, run_dir, before, console)
            console.rename(run_dir / CONSOLE_FILE)
    return Run(run_dir, process)


@contextmanager
def _written(carried: Carried, run_dir: Path) -> Iterator[None]:
    """Put the code where the run will look for it. If no run begins, the directory is again as it was."""
    if not carried.code:
        yield
        return
    check_run_directory(run_dir)
    earlier = move_aside(run_dir) if owner_of(run_dir) else None
    try:
        try:
            carried.write(run_dir)
        except OSError as error:
            raise ConfigurationError(f"--run-dir {run_dir}: {error}") from error
        yield
    finally:
        if owner_of(run_dir) is None:
            shutil.rmtree(run_dir, ignore_errors=True)  # which need not be there
            if earlier is not None:
                earlier.rename(run_dir)


@contextmanager
def _console(run_dir: Path) -> Iterator[Path]:
    """Yield a file next to the run directory for output before that is there; it is gone or moved afterwards."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--run-dir {run_dir}: {error}") from error
    path = run_dir.with_name(f".{run_dir.name}-{uuid.uuid4().hex[:8]}-{CONSOLE_FILE}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _wait_for_directory(
    process: subprocess.Popen[bytes], run_dir: Path, before: tuple[int, int] | None, console: Path
) -> None:
    """Wait until the run has claimed ``run_dir``. Raises what ended it before; an interrupt ends it."""
    try:
        while (status := process.poll()) is None:
            if owner_of(run_dir) not in (None, before):
                return
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(INTERRUPT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if owner_of(run_dir) not in (None, before):
        return  # it is over already, and its summary says how
    said = console.read_text(errors="replace").strip()
    if status == EXIT_CONFIGURATION:
        raise ConfigurationError(by_argument(re.split("^error: ", said, maxsplit=1, flags=re.MULTILINE)[-1]))
    raise MilesAsyncError(f"the run ended before it began, with status {status}:\n{said}")


def _module_path(run_dir: Path) -> list[str]:
    """Directories where the run finds modules: carried code's and, as here, the program's own."""
    installed = {"site-packages", "dist-packages", "lib-dynload"}
    standard = Path(os.__file__).parent
    own = (Path(entry) for entry in sys.path if os.path.isdir(entry or os.curdir))
    paths = (path for path in own if path != standard and not installed.intersection(path.parts))
    return [str(run_dir / CODE_DIRECTORY), *dict.fromkeys(str(path.absolute()) for path in paths)]
