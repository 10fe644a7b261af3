"""Hooks print to a log in the run directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from pathlib import Path
from miles_async.rollout.actor import RolloutActor
RolloutActor(None, Path(sys.argv[1]))
print("of a hook", flush=True)
os.system("echo of its child")
"""


def test_what_the_rollout_process_prints_goes_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rollout-output.log"
    done = subprocess.run([sys.executable, "-c", PROGRAM, log], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
    assert log.read_text() == "of a hook\nof its child\n"
