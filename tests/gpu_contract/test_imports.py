"""Our sources fit the packages of gpu.lock: modules can be imported, names are there and take what they are given."""

from __future__ import annotations

import pytest

from tests.gpu_contract.conftest import Program

pytestmark = pytest.mark.timeout(1300)


@pytest.mark.parametrize("gpus", [False, True], ids=["no GPU", "eight GPUs"])
def test_modules_and_names(program: Program, gpus: bool) -> None:
    assert program("imports", gpus=gpus) == {"names": [], "imports": []}
