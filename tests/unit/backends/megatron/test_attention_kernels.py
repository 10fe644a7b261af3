"""Flags and variables with which Megatron or Transformer Engine would fail in every rank are named before."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_async.backends.megatron.attention_kernels import SWITCHES, attention_problems, usable_backend
from miles_async.backends.megatron.families.known import FAMILIES


@pytest.mark.parametrize(
    ("backend", "environment", "named"),
    [
        ("auto", {}, ()),
        ("auto", {"NVTE_FLASH_ATTN": "1", "NVTE_DEBUG": "1"}, ()),
        ("auto", {"NVTE_FUSED_ATTN": "0"}, ("NVTE_FUSED_ATTN=0 in the environment", "which is auto: unset it")),
        ("fused", {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"}, ()),
        ("flash", {}, ()),
    ],
)
def test_problems_of_the_choice_of_a_kernel(backend: str, environment: dict[str, str], named: tuple[str, ...]) -> None:
    problems = list(attention_problems(backend, environment))
    assert len(problems) == bool(named)
    assert all(words in problems[0] for words in named)


@pytest.mark.parametrize(
    ("named", "installed", "used"),
    [
        ("flash", {"flash-attn": "2.7.4.post1"}, "flash"),
        ("flash", {"flash-attn-3": "3.0.0b1"}, "flash"),
        ("flash", {"flash-attn": "2.8.3.post1", "flash-attn-4": "4.0.0b36"}, "auto"),  # newer than is taken
        ("flash", {"flash-attn-4": "4.0.0b36"}, "auto"),  # has a namespace package flash_attn, which is not it
        ("flash", {}, "auto"),
        ("fused", {}, "fused"),
        ("unfused", {}, "unfused"),
    ],
)
def test_a_flash_attn_that_is_not_installed_leaves_the_choice_to_transformer_engine(
    named: str, installed: dict[str, str], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr("importlib.metadata.version", version)
    assert usable_backend(named) == used


def test_a_rank_asks_megatron_for_the_backend_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_async.backends.megatron import overrides
    from miles_async.backends.megatron.platform import Platform

    monkeypatch.setattr(overrides, "usable_backend", {"flash": "auto"}.get)
    values = overrides.config_values({"attention_backend": "flash"}, Platform.cuda())
    assert values == {"attention_backend": overrides.AttnBackend.auto}


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
