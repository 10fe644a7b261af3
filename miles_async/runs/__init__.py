"""Runs from Python: start one, follow it, read its results, end it. ``import miles_async`` offers these names.

``miles-async train`` is made of the same: ``config.py`` reads flags, ``launch.py`` checks them and runs. ``start`` does
that in a separate process, which outlives a restarted notebook kernel.
Importing this package loads neither torch nor Ray.
"""

from miles_async.runs.config import Config
from miles_async.runs.run import Run, attach
from miles_async.runs.starting import start

__all__ = ["Config", "Run", "attach", "start"]
