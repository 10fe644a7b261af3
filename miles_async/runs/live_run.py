"""The control socket of a live run, for commands."""

from __future__ import annotations

import socket
from pathlib import Path

from miles_async.errors import ConfigurationError
from miles_async.runtime.processes.run_process import find_driver, read_run_process


def control_of(run_dir: Path) -> Path:
    """Return the socket. Raises ConfigurationError: there is no such run, it is over, or on another machine."""
    run = read_run_process(run_dir)
    if run.host != socket.gethostname():
        raise ConfigurationError(f"{run_dir}: the run was started on {run.host}; call this there")
    if find_driver(run) is None:
        raise ConfigurationError(f"the run in {run_dir} is over")
    return Path(run.control)
