"""Becomes an agent of Ray's (2.60) that ends with its raylet: ``python agent_setup.py SCRIPT ...``.

An agent that finds its raylet killed first notifies the cluster, whose server was killed with it, and may wait for that
forever: after ``kill -9`` of a run's driver two processes stay. The agents of a run's own Ray are started with this
script before Ray's (:func:`install`), and the kernel ends them.

A raylet aborts if its agents' ports are not in files within 15 s, a fixed time in which an agent may not even have
imported its modules, on a busy machine or from a slow disk (ray-project/ray#65983). So the ports are written here,
before these imports.
Standard library only.
"""

import ctypes
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OF_ENVIRONMENTS = "--runtime-env-agent-port"
_MINIMAL_HAS_NONE = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


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
    held, arguments = announce_ports(arguments)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    with held:
        runpy.run_path(script, run_name="__main__")


def announce_ports(arguments: Sequence[str]) -> tuple[socket.socket, tuple[str, ...]]:
    """Write the files with the ports of the agent that has these arguments, as the agent itself does later.

    Returns a socket and the arguments to start with. The socket holds the port that is to be free for this process:
    two sockets may be bound to it, as neither shares it while it listens (SO_REUSEADDR, which the agent sets, too).
    """
    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    ports = dict.fromkeys(_MINIMAL_HAS_NONE, -1) if "--minimal" in arguments else {}
    address = options.get("--node-ip-address", "")
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if options.get(_OF_ENVIRONMENTS) == "0":
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        port = ports["runtime_env_agent_port"] = held.getsockname()[1]
        arguments = [f"{_OF_ENVIRONMENTS}={port}" if word == f"{_OF_ENVIRONMENTS}=0" else word for word in arguments]
    for name, port in ports.items():
        path = os.path.join(options["--session-dir"], f"{name}_{options['--node-id']}")
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(str(port))
        os.replace(file.name, path)  # the raylet reads it at any time
    return held, tuple(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
