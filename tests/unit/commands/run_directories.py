"""Run directories as runs leave them, for commands that read them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from miles_async.arguments import Arguments
from miles_async.arguments.config_file import to_toml
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from miles_async.runtime.files.run_directory import CONFIG_FILE
from miles_async.runtime.processes.run_process import RUN_FILE, RunProcess, start_ticks

STEP = {"age/mean": 0.5, "age/max": 1.0, "time/step_seconds": 2.0, "time/wait_seconds": 0.5}


def write_run(
    directory: Path,
    rewards: Sequence[float] = (0.1, 0.5),
    arguments: Arguments | None = None,
    *,
    alive: bool = True,
    host: str = socket.gethostname(),
    more: Mapping[str, float] = STEP,
) -> Path:
    """A run with a trained step per reward, driven by this process if it is ``alive``."""
    (directory / "logs").mkdir(parents=True)
    ticks = start_ticks(os.getpid()) + (not alive)
    run = RunProcess(pid=os.getpid(), started=0.0, start_ticks=ticks, host=host, mark="x")
    (directory / RUN_FILE).write_bytes(msgspec.json.encode(run))
    (directory / CONFIG_FILE).write_text(to_toml(arguments or Arguments()))
    file = MetricsFile(directory / FILE_NAME)
    for step, reward in enumerate(rewards, start=1):
        file.log({"reward/mean": reward, **more}, step=step)
    file.finish()
    return directory
