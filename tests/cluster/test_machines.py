"""Machines made of namespaces are apart from each other and from the host, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.machines import ROOT, Machine, machines, needs_machines, needs_tun

pytestmark = [pytest.mark.integration, needs_machines]


def told(machine: Machine, script: str) -> str:
    done = subprocess.run(machine.command("bash", "-c", script), capture_output=True, text=True, timeout=20)
    return (done.stdout + done.stderr).strip()


def reaches(source: Machine, target: Machine, seconds: float = 15.0) -> bool:
    """True if ``target`` answers at all: it refuses the connection, since nothing listens there."""
    return "refused" in told(source, f"timeout {seconds} bash -c 'echo > /dev/tcp/{target.address}/9'")


def is_cut_off(source: Machine, target: Machine) -> bool:
    return not reaches(source, target, 2.0)


def host_state() -> tuple[set[str], str, str]:
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    return links, Path("/proc/self/mounts").read_text(), subprocess.check_output(["ip", "netns", "list"], text=True)


def test_machines_share_nothing_but_the_network_and_what_is_named(tmp_path: Path) -> None:
    before, shared = host_state(), tmp_path / "shared"
    shared.mkdir()
    with machines(tmp_path, 2, [shared]) as cluster:
        first, second = cluster.all
        assert told(first, f"touch /tmp/own /dev/shm/own {shared}/both && hostname") == "m1"
        assert told(second, f"ls -d /tmp/own /dev/shm/own {shared}/both 2>/dev/null") == f"{shared}/both"
        assert first.seen_from_host("/tmp/own").exists()
        assert told(second, "getent hosts $(hostname)").startswith("127.0.1.1")  # as on Debian
        assert "default" not in told(second, "ip route")
        assert "Read-only" in told(first, f"touch {ROOT}/x")
        assert reaches(first, second)
        cluster.cut(second)
        assert is_cut_off(first, second)
        cluster.reconnect(second)
        assert reaches(first, second)
        second.start("sleep", "1000", log=tmp_path / "sleep.log")
        assert second.has(second.pid)
        assert not first.has(second.pid)
        second.kill()
        assert not second.has(first.pid)
        deadline = time.monotonic() + 10  # the kernel removes a dead machine's links in its own time
        while not (gone := is_cut_off(first, second)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert gone
    assert host_state() == before


@needs_tun
def test_a_slow_wire_delays_or_loses_frames_and_can_be_cut(tmp_path: Path) -> None:
    before = host_state()
    with machines(tmp_path, 3) as cluster:
        first, slow, deaf = cluster.all
        cluster.slow_down(slow, delay=0.2)
        cluster.slow_down(deaf, delay=0.0, loss=1.0)
        for source, target in ((first, slow), (slow, first)):
            began = time.monotonic()
            assert reaches(source, target)
            assert time.monotonic() - began > 0.4  # there and back
        assert is_cut_off(first, deaf)
        cluster.cut(slow)
        assert is_cut_off(first, slow)
        cluster.reconnect(slow)
        assert reaches(first, slow)
    assert host_state() == before


def test_nothing_is_left_when_the_test_is_killed(tmp_path: Path) -> None:
    before = host_state()
    owner = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from tests.cluster.machines import machines
        with machines(Path({str(tmp_path)!r}), 2) as cluster:
            cluster[1].start("sleep", "1000", log=Path({str(tmp_path / "log")!r}))
            print(*(machine.pid for machine in cluster.all), flush=True)
            time.sleep(1000)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", owner], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    firsts = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(firsts) == 2
    everything = [*firsts, *(child for first in firsts for child in first.children(recursive=True))]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    deadline = time.monotonic() + 10
    while (left := [each for each in everything if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert host_state() == before


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
