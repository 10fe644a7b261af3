"""Engines on CPU take what their model, their work and their neighbours leave room for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.engines.cache_bytes import cache_bytes_per_token, state_bytes
from miles_async.engines.sglang.cpu import memory
from miles_async.engines.sglang.cpu.memory import memory_flags

SMOLLM2 = {  # 135 M parameters
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}
HYBRID = SMOLLM2 | {  # every third layer has attention, the others states of 4 heads
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
STATE = 20 * (4 * 4 * 128 * 64 + 2 * 3 * (2 * 2 * 64 + 4 * 128))  # matrices in fp32, inputs of the convolution
GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(memory, "free_memory", lambda: 16 * GIB)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return str(tmp_path)


def tokens(flags: tuple[str, ...]) -> int:
    (flag,) = (flag for flag in flags if flag.startswith("--max-total-tokens="))
    return int(flag.partition("=")[2])


def test_bytes_of_a_token() -> None:
    assert cache_bytes_per_token(SMOLLM2, "float32") == 30 * 2 * 3 * 64 * 4
    assert cache_bytes_per_token(SMOLLM2, "bfloat16") == 30 * 2 * 3 * 64 * 2
    assert cache_bytes_per_token({**SMOLLM2, "head_dim": 128}, "float32") == 30 * 2 * 3 * 128 * 4
    latent = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert cache_bytes_per_token(latent, "bfloat16") == 4 * 576 * 2
    sparse = latent | {"index_topk": 2048, "index_head_dim": 128}
    assert cache_bytes_per_token(sparse, "bfloat16") == 4 * (576 * 2 + 128 + 4)
    assert cache_bytes_per_token({}, "float32") is None


def test_bytes_of_mamba_2() -> None:
    """Nemotron-H-8B: of 52 layers 4 have attention and 24 a state."""
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    config = SMOLLM2 | {"num_hidden_layers": 52, "hybrid_override_pattern": pattern, "conv_kernel": 4, "n_groups": 8}
    config |= {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128}
    assert cache_bytes_per_token(config, "bfloat16") == 4 * 2 * 3 * 64 * 2
    state = 4 * 128 * 64 * 128 + 2 * 3 * (128 * 64 + 2 * 8 * 128)
    assert state_bytes(config, "bfloat16") == 24 * state


def test_bytes_of_layers_with_other_heads() -> None:
    """Gemma 4: as published, and as transformers writes it."""
    kinds = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"]}
    config = SMOLLM2 | kinds | {"num_hidden_layers": 2, "head_dim": 64, "attention_k_eq_v": True}
    for heads in (
        {"global_head_dim": 128, "num_global_key_value_heads": 1},
        {"per_layer_config": {"1": {"head_dim": 128, "num_key_value_heads": 1}}},
    ):
        assert cache_bytes_per_token(config | heads, "bfloat16") == 2 * (3 * 64 + 128) * 2


def test_bytes_of_a_hybrid_model() -> None:
    """By the pattern of its layers, or their list."""
    assert cache_bytes_per_token(HYBRID, "bfloat16") == 10 * 2 * 3 * 64 * 2
    assert state_bytes(HYBRID, "bfloat16") == STATE
    listed = HYBRID | {"layer_types": ["full_attention"] + 29 * ["linear_attention"]}
    assert cache_bytes_per_token(listed, "bfloat16") == 2 * 3 * 64 * 2
    assert state_bytes(listed, "bfloat16") == STATE * 29 // 20
    assert state_bytes(SMOLLM2, "bfloat16") == 0


@pytest.mark.parametrize(("free", "states"), [(16 * GIB, 6 * 64), (GIB, GIB // 8 // STATE), (0, 6)])
def test_states_get_half_of_the_cache(free: int, states: int, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    (Path(model) / "config.json").write_text(json.dumps(HYBRID))
    flags = memory_flags(model, "bfloat16", longest=8, running=64, engines=1)
    assert f"--max-mamba-cache-size={states}" in flags
    assert tokens(flags) == max(8, min(16384, free // 8 // (10 * 2 * 3 * 64 * 2)))


def test_the_cache_holds_the_work_where_there_is_room(model: str) -> None:
    assert tokens(memory_flags(model, "bfloat16", longest=1024, running=32, engines=1)) == 2 * 32 * 1024


def test_memory_is_shared_with_the_other_engines(model: str) -> None:
    per_token = 30 * 2 * 3 * 64 * 4
    for engines in (1, 2, 4):
        found = tokens(memory_flags(model, "float32", longest=4096, running=256, engines=engines))
        assert found == 4 * GIB // engines // per_token


def test_one_sample_always_fits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    assert tokens(memory_flags(model, "float32", longest=4096, running=256, engines=1)) == 4096


def test_no_sample_is_longer_than_the_model_can_be_asked_for(model: str) -> None:
    assert tokens(memory_flags(model, "bfloat16", longest=100_000, running=1, engines=1)) == 2 * 8192


def test_a_model_without_a_config_gets_a_fixed_cache(tmp_path: Path) -> None:
    assert tokens(memory_flags(str(tmp_path), "float32", longest=100, running=256, engines=1)) == 16384


def test_neighbours_may_take_memory_while_it_starts(model: str) -> None:
    """SGLang gives up when less than 1 − fraction of what was free before is free after it has loaded the model."""
    assert "--mem-fraction-static=0.9" in memory_flags(model, "float32", longest=100, running=1, engines=8)
