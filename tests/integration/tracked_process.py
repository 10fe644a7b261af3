"""Log steps to the tracker that the flags name, and print how long the run had to wait for it, in seconds.

Its words: a directory that is filled after the first step (or nothing), the run directory, flags.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from miles_async.arguments.parser import parse_arguments
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.trackers import open_trackers

STEPS = 30
FINISH_SECONDS = 10.0
METRICS = {f"train/metric_{number}": float(number) for number in range(130)}


def main(full: str, run_dir: str, *flags: str) -> None:
    BackgroundTracker.__init__.__kwdefaults__["finish_timeout"] = FINISH_SECONDS
    arguments = parse_arguments(["@examples/quickstart/reverse.args", "--run-dir", run_dir, *flags]).arguments
    began = time.monotonic()
    trackers = open_trackers(arguments.observability, {"optimizer": {"lr": 1e-6}})
    trackers.log(METRICS | {"reward/mean": 0.5}, step=1)
    waited = time.monotonic() - began
    if full:
        time.sleep(5)  # what a tracker opens is open by now, or is opened on a full disk
        _fill(Path(full))
    began = time.monotonic()
    for step in range(2, STEPS + 1):
        trackers.log(METRICS | {"reward/mean": 0.5}, step=step)
    waited += time.monotonic() - began
    began = time.monotonic()
    trackers.finish()
    print(json.dumps({"log": waited, "finish": time.monotonic() - began}), flush=True)


def _fill(directory: Path) -> None:
    """Fill the file system to its last byte."""
    with suppress(OSError), (directory / "fills").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass
    assert os.statvfs(directory).f_bavail == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
