"""Megatron's flags that describe a model. Here config.json of ``--hf-checkpoint`` does: they have to agree with it."""

from __future__ import annotations

from collections.abc import Callable

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, Takes
from miles_async.arguments.model import EXPERT_COUNTS
from miles_async.types import JsonObject

SIGMOID_ROUTERS = ("deepseek_v3", "kimi_k2", "glm4_moe")  # with a bias per expert, by definition of the family
QUERY_KEY_NORMS = ("qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2")  # of DeepSeek's: on the latent vectors
BIASED_PROJECTIONS = ("qwen2", "qwen2_moe")
SANDWICH_NORMS = ("glm4", "gemma2", "gemma3", "gemma3_text")
INTERLEAVED_ROTATIONS = ("glm", "glm4")

Said = tuple[object, str] | None
"""(value that the flag has to have, the words of config.json); None if it doesn't tell."""


def _shape(flag: str, said: Callable[[JsonObject], Said], takes: Takes = "one") -> ForeignFlag:
    def fact(_: Arguments, config: JsonObject) -> Fact | None:
        found = said(config) if config else None
        return found and Fact(found[0], f"config.json of --hf-checkpoint says {found[1]}")

    return ForeignFlag(
        flag=flag, origin="Megatron-LM", verdict="checked", takes=takes, fact=fact,
        note="the model is built by config.json of `--hf-checkpoint`, which must agree",
    )  # fmt: skip


def _field(*names: str, default: object = None) -> Callable[[JsonObject], Said]:
    """The first of these fields of config.json; a dot leads into a table."""

    def said(config: JsonObject) -> Said:
        for name in names:
            table, dot, key = name.rpartition(".")
            content = (config.get(table) or {}) if dot else config
            if (value := content.get(key)) is not None:
                return value, f"{name} {value}"
        return None if default is None else (default, f"nothing of {names[0]}, which means {default}")

    return said


def _family(*families: str, field: str | None = None) -> Callable[[JsonObject], Said]:
    """True for some families of models, and where ``field`` is true."""

    def said(config: JsonObject) -> Said:
        kind = config.get("model_type")
        holds = kind in families or bool(field and config.get(field))
        return holds, f"model_type {kind!r}" + (f" and {field} {config.get(field)}" if field else "")

    return said


def _head_size(config: JsonObject) -> Said:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if "kv_lora_rank" in config:
        return _field("v_head_dim")(config)
    if config.get("head_dim") or not (heads and hidden):
        return _field("head_dim")(config)
    return hidden // heads, f"hidden_size {hidden} and num_attention_heads {heads}"


def _grouped_queries(config: JsonObject) -> Said:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return groups not in (None, heads), f"num_attention_heads {heads} and num_key_value_heads {groups}"


def _norm(config: JsonObject) -> Said:
    is_rms = "rms_norm_eps" in config
    return ("RMSNorm" if is_rms else "LayerNorm"), ("" if is_rms else "nothing of ") + "rms_norm_eps"


def _activation(config: JsonObject) -> Said:
    return config.get("hidden_act", "silu") in ("silu", "swish"), f"hidden_act {config.get('hidden_act', 'silu')!r}"


def _no_biases(config: JsonObject) -> Said:
    return not config.get("mlp_bias"), f"mlp_bias {config.get('mlp_bias', False)}"


def _untied(config: JsonObject) -> Said:
    tied = config.get("tie_word_embeddings")
    return None if tied is None else (not tied, f"tie_word_embeddings {tied}")


def _latent(config: JsonObject) -> Said:
    rank = config.get("kv_lora_rank")
    return rank is not None, f"kv_lora_rank {rank}" if rank is not None else "nothing of kv_lora_rank"


def _shared_experts(config: JsonObject) -> Said:
    size, count = config.get("moe_intermediate_size"), config.get("n_shared_experts")
    if size and count:
        return size * count, f"moe_intermediate_size {size} and n_shared_experts {count}"
    return _field("shared_expert_intermediate_size")(config)


def _score_function(config: JsonObject) -> Said:
    if "scoring_func" in config:
        return _field("scoring_func")(config)
    kind = config.get("model_type")
    return ("sigmoid" if kind in SIGMOID_ROUTERS else "softmax"), f"model_type {kind!r}"


def _layer_kinds(config: JsonObject) -> Said:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return None
    dense = config.get("first_k_dense_replace", 0)
    said = f"num_hidden_layers {layers} and first_k_dense_replace {dense}"
    return [int(layer >= dense) for layer in range(layers)], said


SHAPES: tuple[ForeignFlag, ...] = (
    _shape("--num-layers", _field("num_hidden_layers")),
    _shape("--hidden-size", _field("hidden_size")),
    _shape("--ffn-hidden-size", _field("intermediate_size")),
    _shape("--num-attention-heads", _field("num_attention_heads")),
    _shape("--group-query-attention", _grouped_queries, "nothing"),
    _shape("--num-query-groups", _field("num_key_value_heads")),
    _shape("--kv-channels", _head_size),
    _shape("--vocab-size", _field("vocab_size")),
    _shape("--max-position-embeddings", _field("max_position_embeddings")),
    _shape("--swiglu", _activation, "nothing"),
    _shape("--normalization", _norm),
    _shape("--norm-epsilon", _field("rms_norm_eps", "layer_norm_eps")),
    _shape("--qk-layernorm", _family(*QUERY_KEY_NORMS, field="use_qk_norm"), "nothing"),
    _shape("--post-self-attn-layernorm", _family(*SANDWICH_NORMS), "nothing"),
    _shape("--post-mlp-layernorm", _family(*SANDWICH_NORMS), "nothing"),
    _shape("--add-qkv-bias", _family(*BIASED_PROJECTIONS, field="attention_bias"), "nothing"),
    _shape("--disable-bias-linear", _no_biases, "nothing"),
    _shape("--untie-embeddings-and-output-weights", _untied, "nothing"),
    _shape("--rotary-base", _field("rope_theta", "rope_parameters.rope_theta")),
    _shape("--rotary-percent", _field("partial_rotary_factor", "rope_parameters.partial_rotary_factor", default=1.0)),
    _shape("--rotary-interleaved", _family(*INTERLEAVED_ROTATIONS), "nothing"),
    _shape("--rotary-scaling-factor", _field("rope_scaling.factor", "rope_parameters.factor")),
    _shape("--mscale", _field("rope_scaling.mscale", "rope_parameters.mscale")),
    _shape("--mscale-all-dim", _field("rope_scaling.mscale_all_dim", "rope_parameters.mscale_all_dim")),
    _shape("--multi-latent-attention", _latent, "nothing"),
    _shape("--q-lora-rank", _field("q_lora_rank")),
    _shape("--kv-lora-rank", _field("kv_lora_rank")),
    _shape("--qk-head-dim", _field("qk_nope_head_dim")),
    _shape("--qk-pos-emb-head-dim", _field("qk_rope_head_dim")),
    _shape("--v-head-dim", _field("v_head_dim")),
    _shape("--num-experts", _field(*EXPERT_COUNTS)),
    _shape("--moe-ffn-hidden-size", _field("moe_intermediate_size")),
    _shape("--moe-shared-expert-intermediate-size", _shared_experts),
    _shape("--moe-layer-freq", _layer_kinds),
    _shape("--moe-router-topk", _field("num_experts_per_tok", "num_experts_per_token")),
    _shape("--moe-router-topk-scaling-factor", _field("routed_scaling_factor", default=1.0)),
    _shape("--moe-router-num-groups", _field("n_group")),
    _shape("--moe-router-group-topk", _field("topk_group")),
    _shape("--moe-router-score-function", _score_function),
    _shape("--moe-router-enable-expert-bias", _family(*SIGMOID_ROUTERS), "nothing"),
)
