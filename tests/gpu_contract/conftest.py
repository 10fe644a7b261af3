"""Contracts with the packages of requirements/gpu.lock, on a machine without a GPU (`make test-gpu-contract`).

Each test looks at what a program of this folder found in a process of its own: with torch's CUDA build, and with
stand-ins for what only a GPU machine has (``stand_ins.py``, ``eight_gpus/``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_contract.stand_ins import write_driver

ROOT = Path(__file__).parents[2]
LIMIT = 1200.0  # seconds of one process; the longest takes two minutes on two free cores

Program = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.version.cuda is None or importlib.util.find_spec("sgl_kernel") is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="not the packages of gpu.lock: `make test-gpu-contract`"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, str]]:
    """Make the environment of a process with eight GPUs or none."""
    driver = tmp_path_factory.mktemp("driver")
    write_driver(driver)

    def make(gpus: bool) -> dict[str, str]:
        path = [str(ROOT / "tests" / "gpu_contract" / "eight_gpus")] if gpus else []
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
            "LD_LIBRARY_PATH": os.pathsep.join([str(driver), os.environ.get("LD_LIBRARY_PATH", "")]),
            "HF_HUB_OFFLINE": "1",
        }

    return make


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, environment: Callable[[bool], dict[str, str]]) -> Program:
    """Run a program of this folder, with eight GPUs or none, and return what it found."""
    folder = tmp_path_factory.mktemp("gpu-contract")

    def run(name: str, *, gpus: bool = True) -> Any:
        found = folder / f"{name}-{gpus}.json"
        command = [sys.executable, "-m", f"tests.gpu_contract.{name}", str(found)]
        done = subprocess.run(command, cwd=ROOT, env=environment(gpus), capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return json.loads(found.read_text())

    return run
