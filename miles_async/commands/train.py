"""``miles-async train``: words of a command line for what :mod:`miles_async.runs` offers to programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from miles_async.arguments.config_file import to_toml
from miles_async.runs.config import Config
from miles_async.runs.launch import Show, check, launch
from miles_async.runtime.processes.last_resort import signals_interrupt


def train(words: Sequence[str], show: Show) -> int:
    """Run ``miles-async train``; return the exit code. Raises what :func:`runs.launch.launch` does."""
    with signals_interrupt():
        return train_config(Config.read(words), show)


def train_config(config: Config, show: Show) -> int:
    """Do what the words ask for: print the flags, check them, or run."""
    if config.parsed.print_config:
        show(to_toml(config.arguments))
        return 0
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # where hooks are looked up, here and in the workers
    if config.parsed.dry_run:
        show(check(config))
        return 0
    return launch(config, show)
