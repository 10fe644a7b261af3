"""Becomes an agent of Ray's (2.60) that ends with its raylet: ``python agent_setup.py SCRIPT ...``.

An agent that finds its raylet killed first notifies the cluster, whose server was killed with it, and may wait for that
forever: after ``kill -9`` of a run's driver two processes stay. The agents of a run's own Ray are started with this
script before Ray's (:func:`install`), and the kernel ends them.
Standard library only.
"""

import ctypes
import os
import runpy
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def install() -> None:
    """Make Ray, if this process starts it from now on, start agents with this script."""
    from ray._private import ray_constants, services

    command = services._build_python_executable_command_memory_profileable
    if command.__module__ == __name__:
        return
    agents = (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)

    def tied(component: str, *rest: Any, **options: Any) -> list[str]:
        return [*command(component, *rest, **options), *([__file__] if component in agents else [])]

    services._build_python_executable_command_memory_profileable = tied


def main(script: str, *arguments: str) -> None:
    """Run ``script`` as Python does, in a process that is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
