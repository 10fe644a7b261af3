"""Flags and variables with which Megatron or Transformer Engine would fail in every rank are named before."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_async.backends.megatron.attention_kernels import SWITCHES, attention_problems
from miles_async.backends.megatron.families.known import FAMILIES


@pytest.mark.parametrize(
    ("backend", "environment", "installed", "named"),
    [
        ("auto", {}, (), ()),
        ("auto", {"NVTE_FLASH_ATTN": "1", "NVTE_DEBUG": "1"}, (), ()),
        ("auto", {"NVTE_FUSED_ATTN": "0"}, (), ("NVTE_FUSED_ATTN=0 in the environment", "which is auto: unset it")),
        ("fused", {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"}, (), ()),
        ("flash", {}, ("flash_attn",), ()),
        ("flash", {}, ("flash_attn_interface",), ()),
        ("flash", {}, (), ("needs the package flash-attn",)),
    ],
)
def test_problems_of_the_choice_of_a_kernel(
    backend: str, environment: dict[str, str], installed: tuple[str, ...], named: tuple[str, ...]
) -> None:
    problems = list(attention_problems(backend, environment, installed.__contains__))
    assert len(problems) == bool(named)
    assert all(words in problems[0] for words in named)


def test_megatron_sets_these_variables_for_these_names() -> None:
    spec = find_spec("megatron.core")  # a namespace: found without importing megatron
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "models/common/language_module/language_module.py").read_text()
    for backend, switches in SWITCHES.items():
        (branch,) = re.findall(rf"AttnBackend\.{backend}:\n((?:\s+check_and_set_env_variable\(.*\n)+)", text)
        assert dict(re.findall(r'"(NVTE_\w+)", (\d)', branch)) == switches


def test_gpt_oss_has_layers_that_take_its_sinks() -> None:
    assert FAMILIES["gpt_oss"].host_layers
