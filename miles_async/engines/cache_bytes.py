"""Bytes that an engine's caches take: keys and values of a token, states of a request."""

from __future__ import annotations

from miles_async.arguments.model import LAYER_PATTERN, attention_layers, full_attention
from miles_async.types import JsonObject

_ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1, "mxfp8": 1,
}  # by SGLang's names, including --kv-cache-dtype's  # fmt: skip


def cache_bytes_per_token(config: JsonObject, dtype: str) -> int | None:
    """Bytes of keys and values of a token, in all layers; None if ``config`` or ``dtype`` does not say."""
    item_bytes = _ITEM_BYTES.get(dtype)
    if not isinstance(config.get("num_hidden_layers"), int) or item_bytes is None:
        return None
    layers = attention_layers(config)
    if config.get("kv_lora_rank"):  # latent attention keeps one compressed vector instead
        latent = (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)) * item_bytes
        # Sparse attention's indexer keeps a key, too, in fp8 with an fp32 scale (SGLang 0.5, DSATokenToKVPool).
        indexed = int(config["index_head_dim"]) + 4 if config.get("index_topk") else 0
        return layers * (latent + indexed)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    numbers = layers * kv_heads * int(config.get("head_dim") or hidden // heads)
    if (whole := full_attention(config)) is not None:
        numbers += whole[0] * (whole[1] * whole[2] - kv_heads * int(config["head_dim"]))
    return 2 * numbers * item_bytes


def state_bytes(config: JsonObject, dtype: str) -> int:
    """Bytes of a request's states in layers that are gated delta nets or Mamba-2; 0 if there are none.

    A state is in fp32; inputs of the convolution are kept in ``dtype``.
    """
    if pattern := config.get(LAYER_PATTERN):
        values = config["mamba_num_heads"] * config["mamba_head_dim"]
        keys = config.get("mamba_n_groups", config.get("n_groups", 8)) * config["ssm_state_size"]
        inputs = (values + 2 * keys) * (config.get("mamba_d_conv", config.get("conv_kernel", 4)) - 1)
        state = 4 * values * config["ssm_state_size"] + inputs * _ITEM_BYTES[dtype]
        return int(str(pattern).count("M") * state)
    layers = int(config.get("num_hidden_layers") or 0) - attention_layers(config)
    if not layers:
        return 0
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    inputs = (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1)
    return int(layers * (4 * values * config["linear_key_head_dim"] + inputs * _ITEM_BYTES[dtype]))
