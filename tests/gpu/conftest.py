"""Tests on one CUDA device (`make test-gpu`): without one each is skipped, with the reason.

What they measure is written to ``runs/gpu/DEVICE.json`` (`GPU_FIGURES=DIR` chooses another folder).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.figures import Figures, why_not

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needs = item.get_closest_marker("needs")
        if reason := why_not(needs.args if needs else ()):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*modules): skipped where one of these is not installed")


@pytest.fixture(scope="session")
def figures() -> Iterator[Figures]:
    import torch

    figures = Figures(device=torch.cuda.get_device_name(), torch=torch.__version__)
    yield figures
    figures.write(Path(os.environ.get("GPU_FIGURES", ROOT / "runs" / "gpu")))
