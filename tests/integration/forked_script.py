"""Programs of tests that run in a process forked from one that has imported what they take seconds to import."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from miles_async.runtime.processes.child_process import child_environment
from miles_async.runtime.processes.fork_server_process import ForkServer


def run_forked(server: ForkServer, script: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``program``, which is written to ``script``, with these arguments; return its output and exit status."""
    script.write_text(program)
    command = [*shlex.split(server.interpreter(script.stem)), str(script), *arguments]
    environment = child_environment(server.environment)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert "it refuses" not in done.stderr, done.stderr  # on a busy machine it may import everything itself
    return done
