"""Runs from Python: start one, follow it, read its results, end it. ``import miles_async`` offers these names.

A run is a separate process, started as by the command line, so it outlives a restarted notebook kernel.
Importing this package loads neither torch nor Ray.
"""

from miles_async.runs.config import Config
from miles_async.runs.run import Run, attach
from miles_async.runs.starting import start

__all__ = ["Config", "Run", "attach", "start"]
