"""``miles-async doctor --cluster`` finds faults of machines, each on the machine that has it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.machines import machines, needs_machines

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(240), needs_machines]

OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def test_a_full_memory_and_a_wrong_clock_are_found_on_the_machine_that_has_them(tmp_path: Path) -> None:
    with machines(tmp_path, 2, clocks_ahead={1: 300.0}) as cluster:
        cluster.start_ray()
        first, second = cluster.all
        fill = second.command("fallocate", "--length", "2G", "/dev/shm/others")
        subprocess.run(fill, check=True, timeout=20)
        words = ("-m", "miles_async", "doctor", "--cluster", "--ray-address", cluster.ray_address, "--device", "cpu")
        command = first.command(sys.executable, *words, "--run-dir", "/tmp/runs", env=OFFLINE)
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr  # warnings on a machine without GPUs
    here, *parts = done.stdout.split("node ")
    nodes = {part.partition("\n")[0]: part for part in parts}
    assert list(nodes) == [first.address, second.address]
    assert "ok       reach          reaches all 2 nodes" in nodes[first.address]
    assert "ok       reach          reaches all 2 nodes" in nodes[second.address]
    for told in (here, nodes[first.address]):
        assert "ok       shared memory" in told
    assert "warning  shared memory" in nodes[second.address]
    assert "ok       clock" in nodes[first.address]
    [ahead] = re.findall(r"warning  clock +(\d+) s ahead of that of this machine", nodes[second.address])
    assert 290 <= int(ahead) <= 310, nodes[second.address]
