"""Processes of a run, by the mark in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import psutil
import pytest

from miles_async.runtime.processes.run_process import MARK, RunProcess, find_marked, kill_marked


def test_a_process_whose_program_is_being_replaced_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment and command are empty then."""
    # covers: C10
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(command, env={**os.environ, MARK: mark})
    environ, cmdline, asked = psutil.Process.environ, psutil.Process.cmdline, list[int]()

    def environment(process: psutil.Process) -> dict[str, str]:
        asked.append(process.pid)
        return {} if process.pid == child.pid and asked.count(child.pid) < 3 else environ(process)

    def words(process: psutil.Process) -> list[str]:
        return [] if process.pid == child.pid and asked.count(child.pid) < 3 else cmdline(process)

    monkeypatch.setattr(psutil.Process, "environ", environment)
    monkeypatch.setattr(psutil.Process, "cmdline", words)
    run = RunProcess(pid=os.getpid(), started=0.0, start_ticks=0, host="", mark=mark)
    try:
        assert [process.pid for process in find_marked(run)] == [child.pid]
        assert kill_marked(run) == [f"{child.pid} {psutil.Process(child.pid).name()}"]
    finally:
        child.kill()
    assert child.wait(10) == -9
    assert find_marked(run) == []
