"""The processes of a run: its driver, and the mark that identifies all of them.

Every process of a run inherits an environment variable with the run's mark, wherever it hangs in the process tree and
whatever session it belongs to. ``run.json`` in the run directory has the mark and the driver.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from miles_async.errors import ConfigurationError

RUN_FILE = "run.json"
MARK = "MILES_ASYNC_RUN"
KEEPER = "MILES_ASYNC_KEEPER"  # pid of the process that restarts the run (--max-run-restarts), for its children


class RunProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The driver of a run, as ``run.json`` records it."""

    pid: int
    started: float  # seconds since 1970, for people
    start_ticks: int  # clock ticks since boot, which no change of the clock moves; a later process with its pid differs
    host: str
    mark: str
    control: str = ""  # the socket that commands talk to (control.py)
    keeper_pid: int | None = None  # the driver's parent, if that restarts the run
    keeper_ticks: int = 0  # its start_ticks


def mark_processes() -> None:
    """Mark processes started from now on as parts of a run."""
    os.environ[MARK] = uuid.uuid4().hex


def note_run_process(run_dir: Path, control: Path) -> None:
    """Record this process, which has called :func:`mark_processes`, as the driver of the run in ``run_dir``."""
    this = psutil.Process()
    keeper = parent if os.environ.get(KEEPER) == str(parent := os.getppid()) else None
    record = RunProcess(
        pid=this.pid,
        started=this.create_time(),
        start_ticks=start_ticks(this.pid),
        host=socket.gethostname(),
        mark=os.environ[MARK],
        control=str(control),
        keeper_pid=keeper,
        keeper_ticks=0 if keeper is None else start_ticks(keeper),
    )
    (run_dir / RUN_FILE).write_bytes(msgspec.json.encode(record) + b"\n")


_RUNS_NAMED = 5
_REPLACING_SECONDS = 2.0


def read_run_process(run_dir: Path) -> RunProcess:
    """Read ``run.json``. Raises ConfigurationError unless ``run_dir`` is a run directory."""
    path = run_dir / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunProcess)
    except FileNotFoundError:
        below = sorted(found.parent.name for found in run_dir.glob(f"*/{RUN_FILE}"))
        named = f"; it holds the runs {', '.join(below[:_RUNS_NAMED])}{', ...' * (len(below) > _RUNS_NAMED)}: name one"
        raise ConfigurationError(
            f"expected a run directory with a {RUN_FILE}, found none in {run_dir}{named if below else ''}"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None


def describe_driver(run_dir: Path) -> str:
    """Describe the process that drives the run in ``run_dir``: pid, command and since when."""
    try:
        run = read_run_process(run_dir)
    except ConfigurationError:  # it has the directory, and has not written the file yet
        return "a process that has just started"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    try:
        command = f" ({shlex.join(psutil.Process(run.pid).cmdline())})" if run.host == socket.gethostname() else ""
    except psutil.Error:
        command = ""
    return f"process {run.pid} on {run.host}{command}, since {since}"


def find_driver(run: RunProcess) -> psutil.Process | None:
    """Return the driver, or None if it is dead."""
    return find_process(run.pid, run.start_ticks)


def find_keeper(run: RunProcess) -> psutil.Process | None:
    """Return the process that restarts the run, or None if none does or it is dead."""
    return None if run.keeper_pid is None else find_process(run.keeper_pid, run.keeper_ticks)


def find_process(pid: int, ticks: int) -> psutil.Process | None:
    """Return the process with this pid if it lives and started ``ticks`` after boot, else None."""
    try:
        process = psutil.Process(pid)
        return process if start_ticks(pid) == ticks and is_alive(process) else None
    except (psutil.Error, OSError):
        return None


def expect_own(driver: psutil.Process, run_dir: Path) -> None:
    """Raise ConfigurationError if the driver is another user's, whose processes and files this user cannot reach."""
    if os.geteuid() not in (0, driver.uids().real):
        raise ConfigurationError(f"{run_dir}: the run belongs to {driver.username()}: use this command as that user")


def control_of(run_dir: Path) -> Path:
    """Return the control socket of a live run. Raises ConfigurationError: there is no such run, it is over, on another
    machine, or another user's.
    """
    run = read_run_process(run_dir)
    if run.host != socket.gethostname():
        raise ConfigurationError(f"{run_dir}: the run was started on {run.host}; use this command there")
    if (driver := find_driver(run)) is None:
        stands = "is over" if find_keeper(run) is None else "is being restarted: try again when it runs"
        raise ConfigurationError(f"the run in {run_dir} {stands}")
    expect_own(driver, run_dir)
    return Path(run.control)


def find_marked(run: RunProcess) -> list[psutil.Process]:
    """List the living processes of the run, except this one."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_marked(process, run)]


def kill_marked(run: RunProcess) -> list[str]:
    """Kill the living processes of the run, except this one. Return pid and name of each."""
    killed = []
    for process in find_marked(run):
        with suppress(psutil.NoSuchProcess):
            killed.append(f"{process.pid} {process.name()}")
            process.kill()
    return killed


def is_alive(process: psutil.Process) -> bool:
    """True if the process runs; a zombie doesn't."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot (proc(5)). Raises OSError if there is none."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return int(after_name.split()[19])


def _is_marked(process: psutil.Process, run: RunProcess) -> bool:
    try:
        return is_alive(process) and _environment(process).get(MARK) == run.mark
    except (psutil.Error, OSError):  # gone, or another user's
        return False


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment. It is empty for a moment, as the command is, while the kernel replaces the program; in
    the kernel's threads, which have no file, it always is.
    """
    deadline = time.monotonic() + _REPLACING_SECONDS
    while not (environment := process.environ()) and not process.cmdline() and process.exe():
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return environment
