"""Fields of Megatron's config that config.json says and the bridge misses."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.backends.megatron.provider_fields import provider_fields
from miles_async.errors import ConfigurationError

PLAIN: dict[str, Any] = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 5e5}}
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
    assert provider_fields(PLAIN) == {"rotary_base": 500_000, "rotary_percent": 1.0}


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [([LOCAL, WHOLE, LOCAL, WHOLE, LOCAL], (1, 1)), ([LOCAL, LOCAL, WHOLE], (2, 1)), ([LOCAL, LOCAL], (2, 1))],
)
def test_layers_without_window_are_every_nth(kinds: list[str], pattern: tuple[int, int]) -> None:
    fields = provider_fields(GEMMA3 | {"layer_types": kinds})
    assert fields["interleaved_attn_pattern"] == pattern
    assert fields["rotary_base"] == (1e4, 1e6)
    assert fields["rope_scaling_factor"] == 8.0


def test_layers_without_window_in_another_order_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"full_attention in layers \[1, 3\]"):
        provider_fields(GEMMA3 | {"layer_types": [WHOLE, LOCAL, WHOLE]})
