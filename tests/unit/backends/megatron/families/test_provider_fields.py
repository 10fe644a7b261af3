"""Fields of Megatron's config that config.json says and the bridge misses."""

from __future__ import annotations

import pytest

from miles_async.backends.megatron.families.provider_fields import provider_fields
from miles_async.errors import ConfigurationError

PLAIN: dict[str, object] = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 5e5}}
WINDOWED = PLAIN | {"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 64}
GEMMA3 = WINDOWED | {
    "model_type": "gemma3_text",
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_theta": 1e6, "factor": 8.0},
    },
}
LOCAL, WHOLE = "sliding_attention", "full_attention"


def test_a_window_counts_the_tokens_before_a_token() -> None:
    fields = provider_fields(WINDOWED | {"layer_types": [LOCAL, WHOLE]})
    assert fields["window_size"] == (7, 0)
    assert fields["window_attn_skip_freq"] == [1, 0]
    assert fields["softmax_scale"] == 0.125
    assert "window_size" not in provider_fields(WINDOWED | {"use_sliding_window": False})
    assert provider_fields(PLAIN) == {}


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [([LOCAL, WHOLE, LOCAL, WHOLE, LOCAL], (1, 1)), ([LOCAL, LOCAL, WHOLE], (2, 1)), ([LOCAL, LOCAL], (2, 1))],
)
def test_layers_without_window_are_every_nth(kinds: list[str], pattern: tuple[int, int]) -> None:
    assert provider_fields(GEMMA3 | {"layer_types": kinds})["interleaved_attn_pattern"] == pattern


def test_layers_without_window_in_another_order_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"full_attention in layers \[1, 3\]"):
        provider_fields(GEMMA3 | {"layer_types": [WHOLE, LOCAL, WHOLE]})


def test_the_rotated_part_of_heads_is_as_config_json_says() -> None:
    whole = {"rope_theta": 1e6, "rope_type": "proportional"}
    gemma4 = GEMMA3 | {"model_type": "gemma4_text", "layer_types": [LOCAL, WHOLE]}
    for rope, share in ((whole, 1.0), (whole | {"partial_rotary_factor": 0.5}, 0.5)):
        fields = provider_fields(gemma4 | {"rope_parameters": {WHOLE: rope}})
        assert fields["global_rotary_percent"] == share


def test_latent_attention_without_scaled_positions_has_plain_ones() -> None:
    latent = PLAIN | {"model_type": "deepseek_v3", "kv_lora_rank": 16}
    assert provider_fields(latent) == {"rope_type": "rope"}
    assert provider_fields(latent | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}) == {}


def test_the_router_of_olmoe_is_as_config_json_says() -> None:
    olmoe = PLAIN | {"model_type": "olmoe"}
    assert provider_fields(olmoe | {"norm_topk_prob": False})["moe_router_pre_softmax"] is True
    assert provider_fields(olmoe | {"norm_topk_prob": True})["moe_router_pre_softmax"] is False


def test_gpt_oss_is_as_config_json_says() -> None:
    gpt_oss = PLAIN | {"model_type": "gpt_oss", "swiglu_limit": 5.0}
    assert provider_fields(gpt_oss)["position_embedding_type"] == "rope"
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    fields = provider_fields(gpt_oss | {"rope_parameters": yarn})
    assert fields["activation_func_clamp_value"] == 5.0
    assert fields["yarn_rotary_scaling_factor"] == 4.0
    assert fields["yarn_original_max_position_embeddings"] == 32
    assert fields["yarn_correction_range_round_to_int"] is True
