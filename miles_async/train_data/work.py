"""Work of a model, from config.json: linear in a sequence's tokens, except for attention, which is quadratic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miles_async.arguments.model import (
    LAYER_PATTERN,
    attention_layers,
    experts_per_token,
    full_attention,
    num_experts,
)
from miles_async.types import JsonObject

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """Sizes of a model that work and traffic depend on. Norms and biases are left out."""

    weights: int  # all; an embedding that the output layer doesn't share counts too
    passed_weights: int  # weights that one token is multiplied with: some of a mixture's experts, no embedding
    routed_weights: int  # weights of all experts that a router chooses from
    expert_share: float  # fraction of these that one token passes through
    attention_weights: int  # weights of attention, in all layers
    embedding_weights: int
    pair: int  # multiplications of attention per pair of tokens

    def sequence_flops(self, tokens: float) -> float:
        """Multiplications of a causal forward pass of one sequence; half of the pairs are masked."""
        return tokens * self.passed_weights + tokens**2 / 2 * self.pair

    def touched_weights(self, tokens: int) -> float:
        """Weights that ``tokens`` single tokens read together, if each chooses its experts by chance."""
        touched = 1 - (1 - self.expert_share) ** tokens
        return self.passed_weights + self.routed_weights * (touched - self.expert_share)


def model_work(config: JsonObject) -> ModelWork | None:
    """None if ``config`` (config.json) lacks sizes."""
    if not all(config.get(name) for name in NEEDED):
        return None
    per_layer, per_pair = _latent_attention(config) if config.get("kv_lora_rank") else _attention(config)
    layers, vocabulary = attention_layers(config), config["hidden_size"] * config["vocab_size"]
    shared, routed, share = _feed_forward(config)
    attention, pair = layers * per_layer, layers * per_pair
    if (whole := full_attention(config)) is not None:
        count, size, groups = whole
        weights, products = _attention({**config, "head_dim": size, "num_key_value_heads": groups})
        if config.get("attention_k_eq_v"):  # keys are the values, too
            weights -= config["hidden_size"] * size * groups
        attention, pair = attention + count * (weights - per_layer), pair + count * (products - per_pair)
    if pattern := config.get(LAYER_PATTERN):
        attention += pattern.count("M") * _mamba(config)
    elif others := config["num_hidden_layers"] - layers:
        attention += layers * _output_gate(config) + others * _gated_delta_net(config)
    always = attention + shared + vocabulary
    return ModelWork(
        weights=always + routed + (0 if config.get("tie_word_embeddings") else vocabulary),
        passed_weights=always + round(routed * share),
        routed_weights=routed,
        expert_share=share,
        attention_weights=attention,
        embedding_weights=vocabulary,
        pair=pair,
    )


def sequence_work(lengths: npt.ArrayLike, quadratic: float) -> npt.NDArray[np.float64]:
    """float64 [S]: tokens + quadratic × tokens². ``lengths`` in tokens; ``quadratic`` from :func:`quadratic_work`."""
    tokens = np.asarray(lengths, dtype=np.float64)
    return tokens + quadratic * tokens**2


def quadratic_work(config: JsonObject) -> float:
    """Work of causal attention per token², relative to the work per token of all weights.

    In a sequence of 1 / quadratic tokens attention costs as much as all weights together. The backward pass doubles
    both, and so changes nothing. 0 if ``config`` (config.json) lacks sizes: work is the number of tokens then.
    """
    work = model_work(config)
    return 0.0 if work is None else work.pair / 2 / work.passed_weights


def _attention(config: JsonObject) -> tuple[int, int]:
    """(weights of a layer, multiplications of a layer per pair of tokens)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    return hidden * width * 2 * (heads + key_value_heads), heads * width * 2


def _output_gate(config: JsonObject) -> int:
    """Weights of the gate of attention's output in a layer of a hybrid model."""
    return int(config["hidden_size"] * config["num_attention_heads"] * config["head_dim"])


def _gated_delta_net(config: JsonObject) -> int:
    """Weights of a layer of linear attention. Its recurrence costs less than they do, and is left out."""
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    return int(config["hidden_size"] * (2 * keys + 3 * values + 2 * heads))


def _mamba(config: JsonObject) -> int:
    """Weights of a Mamba-2 layer. Its recurrence costs less than they do, and is left out."""
    heads, groups = config["mamba_num_heads"], config.get("mamba_n_groups", config.get("n_groups", 8))
    width = heads * config["mamba_head_dim"]
    return int(config["hidden_size"] * (3 * width + 2 * groups * config["ssm_state_size"] + heads))


def _latent_attention(config: JsonObject) -> tuple[int, int]:
    """The same for multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotated, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    key = rotated + plain
    query_rank = config.get("q_lora_rank")
    query = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
    weights = query + hidden * (latent + rotated) + latent * heads * (plain + value) + heads * value * hidden
    return weights, heads * (key + value)


def _feed_forward(config: JsonObject) -> tuple[int, int, float]:
    """All layers: (weights of every token, weights of routed experts, the share of these that one token takes)."""
    if config.get(LAYER_PATTERN):
        return _ungated_feed_forward(config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dense = 3 * hidden * config["intermediate_size"]
    experts = num_experts(config)
    if not experts:
        return layers * dense, 0, 0.0
    first_dense = config.get("first_k_dense_replace") or 0
    width = config.get("moe_intermediate_size") or config["intermediate_size"]  # gpt-oss and MiniMax-M2 have no other
    mixtures, expert = layers - first_dense, 3 * hidden * width
    shared_expert = expert * (config.get("n_shared_experts") or 0)
    if shared_width := config.get("shared_expert_intermediate_size"):
        shared_expert = 3 * hidden * shared_width + hidden  # and its gate
    if config.get("enable_moe_block"):  # Gemma 4 has an MLP next to the experts
        shared_expert = dense
    shared = mixtures * (hidden * experts + shared_expert)
    return first_dense * dense + shared, mixtures * experts * expert, (experts_per_token(config) or 0) / experts


def _ungated_feed_forward(config: JsonObject) -> tuple[int, int, float]:
    """The same for Nemotron-H, where an MLP or a mixture is a separate layer, of two matrices."""
    hidden, pattern = config["hidden_size"], config[LAYER_PATTERN]
    dense, mixtures = pattern.count("-") * 2 * hidden * config["intermediate_size"], pattern.count("E")
    if not mixtures:
        return dense, 0, 0.0
    experts, latent = config["n_routed_experts"], config.get("moe_latent_size")
    shared = 2 * hidden * config["moe_shared_expert_intermediate_size"] * config["n_shared_experts"]
    shared += hidden * experts + (2 * hidden * latent if latent else 0)
    routed = mixtures * experts * 2 * (latent or hidden) * config["moe_intermediate_size"]
    return dense + mixtures * shared, routed, config["num_experts_per_tok"] / experts
