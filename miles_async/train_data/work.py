"""Compute cost of a sequence: one part is linear in its tokens, attention is quadratic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miles_async.arguments.model import EXPERT_COUNTS
from miles_async.types import JsonObject

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def sequence_work(lengths: npt.ArrayLike, quadratic: float) -> npt.NDArray[np.float64]:
    """float64 [S]: tokens + quadratic × tokens². ``lengths`` in tokens; ``quadratic`` from :func:`quadratic_work`."""
    tokens = np.asarray(lengths, dtype=np.float64)
    return tokens + quadratic * tokens**2


def quadratic_work(config: JsonObject) -> float:
    """Work of causal attention per token², relative to the work per token of all weights.

    In a sequence of 1 / quadratic tokens attention costs as much as all weights together. The backward pass doubles
    both, and so changes nothing. 0 if ``config`` (config.json) lacks sizes: work is the number of tokens then.
    """
    if not all(config.get(name) for name in NEEDED):
        return 0.0
    per_layer, per_pair = _latent_attention(config) if config.get("kv_lora_rank") else _attention(config)
    layers = config["num_hidden_layers"]
    weights = layers * per_layer + _feed_forward(config) + config["hidden_size"] * config["vocab_size"]
    return float(layers * per_pair / 2 / weights)  # half of the pairs are masked


def _attention(config: JsonObject) -> tuple[int, int]:
    """(weights of a layer, multiplications of a layer per pair of tokens)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    return hidden * width * 2 * (heads + key_value_heads), heads * width * 2


def _latent_attention(config: JsonObject) -> tuple[int, int]:
    """The same for multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotated, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    key = rotated + plain
    query_rank = config.get("q_lora_rank")
    query = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
    weights = query + hidden * (latent + rotated) + latent * heads * (plain + value) + heads * value * hidden
    return weights, heads * (key + value)


def _feed_forward(config: JsonObject) -> int:
    """Feed-forward weights of all layers that one token passes through: some of a mixture's experts."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dense = 3 * hidden * config["intermediate_size"]
    experts = next((config[name] for name in EXPERT_COUNTS if config.get(name)), 0)
    if not experts:
        return int(layers * dense)
    first_dense = config.get("first_k_dense_replace") or 0
    passed = config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
    mixture = hidden * (experts + 3 * config["moe_intermediate_size"] * passed)
    return int(first_dense * dense + (layers - first_dense) * mixture)
