"""Fusions of a rank with Transformer Engine: on by default where they compute the same, off where a kernel is missing.

Megatron's and the bridge's own configs are made, with stand-ins for the kernels that Megatron looks for.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from megatron.bridge import AutoBridge
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import transformer_config
from megatron.core.transformer.moe import moe_utils
from transformers import AutoConfig

from miles_async.arguments.model import ModelArguments
from miles_async.backends.megatron.model import fusions
from miles_async.backends.megatron.model.build import make_provider
from miles_async.backends.megatron.platform import Platform

CONFIGS = Path(__file__).parents[4] / "recipes/configs"
FUSED = ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")
WITH_ENGINE = Platform(device="cuda", transformer_engine=True)


def stand_in(*_: object, **__: object) -> None:
    raise AssertionError("a config was made, nothing computed")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's configs look for when a fusion is on, and the bridge's sign of Transformer Engine."""
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, stand_in)
    for name in (name for name in dir(moe_utils) if name.startswith("fused_")):
        if getattr(moe_utils, name) is None:
            monkeypatch.setattr(moe_utils, name, stand_in)
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_, **__: True)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def provider_of(name: str, *flags: str, platform: Platform = WITH_ENGINE) -> Any:
    config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    model = ModelArguments(hf_checkpoint=CONFIGS / name, bf16=True, megatron_extra=flags)
    return make_provider(AutoBridge.from_hf_config(config), config.to_dict(), model, platform, load_weights=False)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("Qwen3-4B", FUSED),
        ("Qwen3-30B-A3B", FUSED),
        ("Llama-3.1-8B-Instruct", FUSED),
        ("GLM-4.5", FUSED),
        ("GLM-Z1-9B-0414", FUSED),  # interleaved
        ("MiniMax-M2", FUSED),
        ("GLM-4.7-Flash", FUSED[1:]),  # latent attention
        ("DeepSeek-R1", FUSED[1:]),
    ],
)
def test_models_train_with_the_fusions_that_compute_the_same(name: str, fused: tuple[str, ...]) -> None:
    provider = provider_of(name)
    assert [each for each in FUSED if getattr(provider, each)] == list(fused)
    assert not any(getattr(provider_of(name, platform=Platform.cpu()), each) for each in FUSED)


def test_layers_of_plain_pytorch_have_no_fusions() -> None:
    provider = provider_of("gpt-oss-20b")
    assert not any(getattr(provider, each) for each in FUSED)


@pytest.mark.parametrize("name", ["Qwen3-4B", "DeepSeek-R1"])  # by default, and set by the bridge
def test_gradients_are_accumulated_by_a_kernel_only_where_the_output_layer_has_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert provider_of(name).gradient_accumulation_fusion is False
    monkeypatch.setattr(fusions.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    assert provider_of(name).gradient_accumulation_fusion is True


def test_a_flag_of_the_user_wins() -> None:
    flags = ("--apply-rope-fusion", "false", "--bias-dropout-fusion", "false", "--gradient-accumulation-fusion")
    provider = provider_of("Qwen3-4B", *flags)
    assert (provider.apply_rope_fusion, provider.bias_dropout_fusion) == (False, False)
    assert provider.gradient_accumulation_fusion is True
