"""The script that ties Ray's agents to their raylet."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray._private import ray_constants, services

from miles_async.runtime.cluster import agent_setup

AGENT = """
import json, os, sys, time
print(json.dumps([sys.argv, sys.path[0], __name__, os.getpid()]), flush=True)
time.sleep(100)
"""
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()"


def test_the_agent_is_run_as_by_python_and_is_killed_with_its_parent(tmp_path: Path) -> None:  # covers: C10
    (script := tmp_path / "agent.py").write_text(AGENT)
    command = [sys.executable, "-c", PARENT, agent_setup.__file__, str(script), "--port=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        arguments, first_path, name, pid = json.loads(parent.stdout.readline())
        assert (arguments, first_path, name) == ([str(script), "--port=1"], str(tmp_path), "__main__")
        agent = psutil.Process(pid)
        os.kill(parent.pid, signal.SIGKILL)
        psutil.wait_procs([agent], timeout=20)
        assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE


def test_ray_still_starts_agents_by_what_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "_build_python_executable_command_memory_profileable"
    plain = getattr(services, name)
    monkeypatch.setattr(services, name, plain)
    started = inspect.getsource(services.start_raylet)
    for agent in ("DASHBOARD_AGENT", "RUNTIME_ENV_AGENT"):
        assert f"{name}(\n            ray_constants.PROCESS_TYPE_{agent}" in started
    agent_setup.install()
    agent_setup.install()
    for component, tied in ((ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, True), ("log_monitor", False)):
        expected = [*plain(component, str(tmp_path)), *([agent_setup.__file__] if tied else [])]
        assert getattr(services, name)(component, str(tmp_path)) == expected
