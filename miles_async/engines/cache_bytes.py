"""Bytes that the keys and values of a token take in an engine's cache."""

from __future__ import annotations

from miles_async.types import JsonObject

_ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1, "mxfp8": 1,
}  # by SGLang's names, those of --kv-cache-dtype included  # fmt: skip


def cache_bytes_per_token(config: JsonObject, dtype: str) -> int | None:
    """Bytes of keys and values of a token, in all layers; None if ``config`` or ``dtype`` does not tell."""
    layers = config.get("num_hidden_layers")
    item_bytes = _ITEM_BYTES.get(dtype)
    if not isinstance(layers, int) or item_bytes is None:
        return None
    if config.get("kv_lora_rank"):  # latent attention keeps one compressed vector instead
        return layers * (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)) * item_bytes
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return layers * 2 * kv_heads * int(config.get("head_dim") or hidden // heads) * item_bytes
