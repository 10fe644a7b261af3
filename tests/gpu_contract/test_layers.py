"""Megatron's models of presets with Transformer Engine's layers can be built, the bridge knows each tensor, and
gradients are reduced as those of plain layers.
"""

from __future__ import annotations

import pytest

from tests.gpu_contract.conftest import Program
from tests.gpu_contract.layers import CHECKED

PLAIN = {
    "gemma-4-26b-a4b",
    "gemma-4-31b",
    "gpt-oss-20b",
    "gpt-oss-120b",
}  # presets whose layers are of PyTorch on every device (docs/cuda.md)

pytestmark = pytest.mark.timeout(1300)


def test_presets(program: Program) -> None:
    found = program("layers")
    expected = {"lost": [], "marked otherwise": {}}
    assert found == {preset: expected | {"fused": preset not in PLAIN} for preset in CHECKED}
