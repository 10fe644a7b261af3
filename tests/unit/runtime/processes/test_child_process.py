"""Ports, child processes, commands and the launcher's shims; nothing heavier than a python -c."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from miles_async.engines.kind import ServerSpec
from miles_async.runtime.processes.child_process import ChildProcess
from tests.unit.runtime.processes.waiting import number_in, until_gone
from tests.waiting import until

SPEC = ServerSpec(model_path="/models/m", device="cpu", dtype="float32")


async def test_a_child_writes_to_its_file_with_our_interpreter(tmp_path: Path) -> None:  # covers: A7
    code = "import sys; print(sys.executable); print('oops', file=sys.stderr); sys.exit(3)"
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "logs" / "c.log", environment={})
    child.start()
    assert await child.wait() == 3
    assert sys.executable in child.tail()
    assert child.tail(1) in ("oops", sys.executable)
    assert "oops" in child.tail()


async def test_a_child_knows_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # covers: A6
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    code = "import urllib.request; print(urllib.request.getproxies())"
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "c.log", environment={})
    child.start()
    assert await child.wait() == 0
    assert child.tail(1) == "{}"


async def test_stop_reaps_grandchildren_that_ignore_sigterm(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = textwrap.dedent(f"""
        import subprocess, sys, time
        grandchild = subprocess.Popen([sys.executable, "-c", {stubborn!r}], start_new_session=True)
        print(grandchild.pid, flush=True)
        time.sleep(60)
    """)
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "c.log", environment={})
    child.start()
    grandchild = await number_in(child)
    await child.stop(grace_seconds=0.3)
    assert child.returncode is not None
    await until_gone(grandchild)


@pytest.mark.parametrize("died", [False, True])
async def test_stop_leaves_no_shared_memory(tmp_path: Path, died: bool) -> None:
    code = textwrap.dedent("""
        import mmap, multiprocessing, os, tempfile, time
        from multiprocessing import shared_memory
        mapped = tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False)  # of which Python's tracker knows nothing
        mapped.truncate(64)
        mapping = mmap.mmap(mapped.fileno(), 64)
        segment = shared_memory.SharedMemory(create=True, size=64)
        semaphore = multiprocessing.get_context("spawn").Semaphore()
        names = mapped.name, segment.name, "sem." + semaphore._semlock.name.lstrip("/"), os.getpid()
        print(*names, sep=":", flush=True)
        time.sleep(60)
    """)
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "c.log", environment={})
    child.start()
    await until(lambda: child.tail(1).endswith(f":{child.pid}"))
    files = [Path("/dev/shm") / name for name in child.tail(1).split(":")[:3]]
    assert all(file.exists() for file in files)
    if died:
        child.note_shared_memory()
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
    await child.stop(grace_seconds=0)
    assert not any(file.exists() for file in files)


async def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import asyncio, time
        from pathlib import Path
        from miles_async.runtime.processes.child_process import ChildProcess
        child = ChildProcess("c", ["-c", "import time; time.sleep(60)"],
                             log_path=Path({str(tmp_path)!r}) / "c.log", environment={{}})
        child.start()
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    parent = ChildProcess("p", ["-c", code], log_path=tmp_path / "p.log", environment={})
    parent.start()
    child_pid = await number_in(parent)
    psutil.Process(parent.pid).send_signal(signal.SIGKILL)  # no chance to clean up
    await parent.wait()
    await until_gone(child_pid)
