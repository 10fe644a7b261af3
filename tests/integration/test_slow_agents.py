"""Ray's agents come up later than its raylet waits for their ports, as on a busy machine or from a slow disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.integration]

SLOW_AGENT = """
import runpy, sys, time
from miles_async.runtime.cluster import agent_setup

run = runpy.run_path
runpy.run_path = lambda *arguments, **options: (time.sleep(35), run(*arguments, **options))
agent_setup.main(*sys.argv[1:])
"""
START = """
import asyncio, sys, time
import ray
from miles_async.runtime.cluster import agent_setup
from miles_async.runtime.cluster.ray_cluster import ray_cluster

agent_setup.__file__ = sys.argv[1]

async def main():
    async with ray_cluster(None, {"A_VARIABLE": "its value"}, None):
        function = ray.remote(num_cpus=0)(lambda: __import__("os").environ["A_VARIABLE"])
        began = time.monotonic()
        print(await asyncio.to_thread(ray.get, function.remote()))
        assert time.monotonic() - began > 20

asyncio.run(main())
"""


def test_ray_starts_and_waits_for_them(tmp_path: Path) -> None:  # covers: C10
    (agent := tmp_path / "agent.py").write_text(SLOW_AGENT)
    command = [sys.executable, "-c", START, str(agent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout) == (0, "its value\n"), done.stderr[-2000:]
