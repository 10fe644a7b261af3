"""A run ends within seconds of a signal, whatever its main thread is stuck in; and when its Ray is gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from miles_async.runtime.cluster.ray_cluster import OwnRay

# covers: C10

DRIVER = """
import asyncio, os, signal, sys, time
from miles_async.runtime.processes import last_resort

def end(interrupted, reason):
    print("ended at once:", interrupted, reason, flush=True)
    os._exit(9)

async def main(resort):
    resort.interrupts_this_task()
    if "up" in sys.argv:
        resort.all_is_up()
    if "alarm" in sys.argv:
        signal.alarm(2)
    print("ready", flush=True)
    ready.append(True)
    if "stuck" in sys.argv:
        while True:
            time.sleep(300)
    await asyncio.sleep(300)

if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
if "stuck" in sys.argv or "lost" in sys.argv:
    last_resort.STARTING_SECONDS, last_resort.GRACE_SECONDS = 0.5, 0.5
ready = []
try:
    with last_resort.LastResort(end, lambda: "Ray is gone" if ready and "lost" in sys.argv else "") as resort:
        asyncio.run(main(resort))
except asyncio.CancelledError:
    print("ended in order", resort.interrupted, flush=True)
"""


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def hear_sighup() -> None:
    """Also in tests that run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def driver(drivers: list[subprocess.Popen[str]], *manners: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", DRIVER, *manners]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=hear_sighup)
    drivers.append(process)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_run(drivers: list[subprocess.Popen[str]], number: signal.Signals) -> None:
    process = driver(drivers)
    process.send_signal(number)
    assert process.communicate(timeout=50)[0] == "ended in order True\n"


def test_under_nohup_a_terminal_that_closes_does_not_end_it(drivers: list[subprocess.Popen[str]]) -> None:
    process = driver(drivers, "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=50)[0] == "ended in order True\n"


def test_a_run_whose_terminal_closes_ends_in_order(drivers: list[subprocess.Popen[str]]) -> None:
    """Further output goes nowhere and raises nothing."""
    outside, terminal = os.openpty()
    adopt = "import fcntl, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0)"
    words = [sys.executable, "-c", f"{adopt}\n{DRIVER}"]
    process = subprocess.Popen(
        words,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        text=True,
        start_new_session=True,
        preexec_fn=hear_sighup,
    )
    drivers.append(process)
    os.close(terminal)
    with open(outside, "rb", buffering=0) as reader:
        assert reader.readline() == b"ready\r\n"
    assert process.wait(50) == 0


def test_a_main_thread_that_is_stuck_is_not_waited_for(drivers: list[subprocess.Popen[str]]) -> None:
    process = driver(drivers, "stuck")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=50)[0] == "ended at once: True the run did not end within 0.5 s\n"


def test_a_run_that_is_up_gets_time_to_end(drivers: list[subprocess.Popen[str]]) -> None:
    process = driver(drivers, "stuck", "up")
    process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert process.poll() is None


def test_an_alarm_that_rays_handler_set_does_not_end_it(drivers: list[subprocess.Popen[str]]) -> None:
    process = driver(drivers, "stuck", "up", "alarm")
    process.send_signal(signal.SIGTERM)
    time.sleep(4)
    assert process.poll() is None


def test_without_ray_a_run_ends(drivers: list[subprocess.Popen[str]]) -> None:
    process = driver(drivers, "lost")
    assert process.communicate(timeout=50)[0] == "ended at once: False Ray is gone\n"


@pytest.fixture
def ray_processes(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Children of this process with the names of Ray's."""
    processes = {}
    for name in ("gcs_server", "raylet"):
        program = tmp_path / name
        shutil.copy(str(shutil.which("sleep")), program)
        with (tmp_path / f"{name}.out").open("w") as output:
            processes[name] = subprocess.Popen([str(program), "60"], stdout=output, stderr=subprocess.DEVNULL)
    yield processes
    for process in processes.values():
        process.kill()
        process.wait(10)


def until_named(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 10
    while {psutil.Process(process.pid).name() for process in processes.values()} != set(processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_loss_of_either_of_rays_processes_is_noticed(
    ray_processes: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    until_named(ray_processes)
    own = OwnRay()
    assert own.lost() == ""
    (tmp_path / "raylet.out").write_text("started\nno memory is left\n")
    ray_processes["raylet"].kill()
    deadline = time.monotonic() + 10
    while not own.lost() and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = ray_processes["raylet"].pid
    assert own.lost() == f"Ray has ended: raylet (process {pid}, whose last line is: no memory is left)"


def test_ray_may_be_shut_down(ray_processes: dict[str, subprocess.Popen[bytes]]) -> None:
    until_named(ray_processes)
    own = OwnRay()
    assert own.lost() == ""
    own.ends()
    for process in ray_processes.values():
        process.kill()
        process.wait(10)
    assert own.lost() == ""
