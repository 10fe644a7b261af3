"""The patch that keeps scales of the KV cache at 1 is still needed, and says what SGLang understands."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_async.engines.sglang.patches import CACHE_SCALES, without_cache_scales
from tests.sglang_source import module_source


@pytest.fixture(scope="module")
def process() -> Callable[[Any, Any], None]:
    """SGLang's own method, without the rest of SGLang."""
    source = module_source(CACHE_SCALES.rpartition(".")[0])
    scope: dict[str, Any] = {"torch": torch, "is_fp8_fnuz": lambda: False}
    exec(dedent("    def process_weights_after_loading(" + source.partition("weights_after_loading(")[2]), scope)
    return scope["process_weights_after_loading"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("forgotten", [True, False])
def test_scales_that_a_dummy_load_drew_are_forgotten(forgotten: bool, process: Callable[[Any, Any], None]) -> None:
    layer = SimpleNamespace(k_scale=torch.tensor(5e-4), v_scale=torch.tensor(5e-4))
    for _ in range(2):  # after every publication
        if forgotten:
            without_cache_scales(process, None, layer)
        else:
            process(None, layer)
    expected = 1.0 if forgotten else pytest.approx(5e-4)
    assert layer.k_scale.item() == layer.k_scale_float == layer.v_scale.item() == layer.v_scale_float == expected
