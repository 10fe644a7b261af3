"""The script that ties Ray's agents to their raylet."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from ray._private import ray_constants, services

from miles_async.runtime.cluster import agent_setup

RAYLET = import_module("ray._raylet")  # compiled
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


def announced(session: Path, *arguments: str) -> tuple[dict[str, str], socket.socket, tuple[str, ...]]:
    common = ("--node-id=n1", "--node-ip-address=127.0.0.1", f"--session-dir={session}")
    held, words = agent_setup.announce_ports([*common, *arguments])
    assert words[: len(common)] == common
    return {path.name: path.read_text() for path in session.iterdir()}, held, words[len(common) :]


def test_a_minimal_agent_says_at_once_that_it_serves_nothing(tmp_path: Path) -> None:
    files, held, words = announced(tmp_path, "--grpc-port=0", "--minimal")
    held.close()
    assert words == ("--grpc-port=0", "--minimal")
    names = (
        RAYLET.METRICS_AGENT_PORT_NAME,
        RAYLET.METRICS_EXPORT_PORT_NAME,
        RAYLET.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    )
    assert files == dict.fromkeys((f"{name}_n1" for name in names), "-1")


def test_a_whole_agent_says_its_ports_itself(tmp_path: Path) -> None:
    files, held, words = announced(tmp_path, "--grpc-port=0", "--runtime-env-agent-port=4000")
    held.close()
    assert (files, words) == ({}, ("--grpc-port=0", "--runtime-env-agent-port=4000"))


def test_the_port_for_environments_is_held_for_the_agent(tmp_path: Path) -> None:
    files, held, (word,) = announced(tmp_path, "--runtime-env-agent-port=0")
    port = int(files[f"{RAYLET.RUNTIME_ENV_AGENT_PORT_NAME}_n1"])
    assert word == f"--runtime-env-agent-port={port}"
    with held, socket.socket() as stranger, socket.socket() as agent:
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("127.0.0.1", port))
        agent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the agent does
        agent.bind(("127.0.0.1", port))
        agent.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            agent.accept()[0].close()


def test_ray_still_starts_its_agent_for_environments_so() -> None:
    source = (Path(services.__file__).parent / "runtime_env" / "agent" / "main.py").read_text()
    assert "sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n    sock.bind(sockaddr)" in source
    assert "port = args.runtime_env_agent_port or 0" in source
