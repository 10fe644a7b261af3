"""Megatron's flags that describe a model. Here config.json of ``--hf-checkpoint`` does: they have to agree with it."""

from __future__ import annotations

from collections.abc import Callable

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, Takes
from miles_async.arguments.model import EXPERT_COUNTS
from miles_async.types import JsonObject

SIGMOID_ROUTERS = ("deepseek_v3", "kimi_k2", "glm4_moe")  # with a bias per expert, by definition of the family
QUERY_KEY_NORMS = (
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gemma4_text",
    "olmoe",
    "deepseek_v3",
    "kimi_k2",
)  # of DeepSeek's: on the latent vectors
BIASED_PROJECTIONS = ("qwen2", "qwen2_moe")
SANDWICH_NORMS = ("glm4", "gemma2", "gemma3", "gemma3_text", "gemma4_text")
INTERLEAVED_ROTATIONS = ("glm", "glm4")

Said = tuple[object, str] | None
"""(value that the flag has to have, the words of config.json); None if it doesn't say. No flag agrees with the value
None: the model has no such part.
"""

UNTOLD = object()
"""Default of a field whose absence means nothing."""


def _shape(
    flag: str,
    said: Callable[[JsonObject], Said],
    takes: Takes = "one",
    must_be: str = "",
    only: tuple[str, ...] = (),
) -> ForeignFlag:
    def fact(_: Arguments, config: JsonObject) -> Fact | None:
        found = said(config) if config else None
        return found and Fact(found[0], f"config.json of --hf-checkpoint says {found[1]}")

    return ForeignFlag(
        flag=flag, origin="Megatron-LM", verdict="checked", takes=takes, fact=fact, only=only,
        note=f"must be {must_be or 'what follows from config.json'}, by which the model is built",
    )  # fmt: skip


def _field(*names: str, default: object = UNTOLD) -> Callable[[JsonObject], Said]:
    """The first of these fields of config.json, ``default`` if all are absent; a dot leads into a table."""

    def said(config: JsonObject) -> Said:
        for name in names:
            table, dot, key = name.rpartition(".")
            content = (config.get(table) or {}) if dot else config
            if (value := content.get(key)) is not None:
                return value, f"{name} {value}"
        if default is UNTOLD:
            return None
        return default, f"nothing of {names[0]}, which means {'none' if default is None else default}"

    return said


def _named(flag: str, *names: str, default: object = UNTOLD) -> ForeignFlag:
    return _shape(flag, _field(*names, default=default), must_be=f"{names[0]} of config.json")


_experts = _field(*EXPERT_COUNTS, default=0)


def _in_mixture(said: Callable[[JsonObject], Said]) -> Callable[[JsonObject], Said]:
    """Wrap ``said`` for a flag about experts: for a dense model no value agrees."""

    def said_of_mixture(config: JsonObject) -> Said:
        experts = _experts(config)
        return said(config) if experts and experts[0] else experts and (None, experts[1])

    return said_of_mixture


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
    return _field("shared_expert_intermediate_size", default=None)(config)


def _score_function(config: JsonObject) -> Said:
    if "scoring_func" in config:
        return _field("scoring_func")(config)
    kind = config.get("model_type")
    return ("sigmoid" if kind in SIGMOID_ROUTERS else "softmax"), f"model_type {kind!r}"


def _pre_softmax(config: JsonObject) -> Said:
    """Softmax before the choice of experts: their weights do not add up to 1. A sigmoid does not depend on it."""
    score, normalized = _score_function(config), config.get("norm_topk_prob")
    if score and score[0] == "sigmoid":
        return True, score[1]
    return None if normalized is None else (not normalized, f"norm_topk_prob {normalized}")


def _position_types(config: JsonObject) -> Said:
    """Values of --position-embedding-type. With YaRN rope is right, too: recipes of DeepSeek give it."""
    kind = _field(
        *("rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.rope_type", "rope_parameters.type"),
        default="default",
    )(config)
    return kind and (frozenset(("rope", "yarn") if kind[0] == "yarn" else ("rope",)), kind[1])


def _layer_kinds(config: JsonObject) -> Said:
    layers, experts = config.get("num_hidden_layers"), _experts(config)
    if isinstance(layers, int) and experts and not experts[0]:
        return [0] * layers, experts[1]
    if not isinstance(layers, int) or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return None
    dense = config.get("first_k_dense_replace", 0)
    said = f"num_hidden_layers {layers} and first_k_dense_replace {dense}"
    return [int(layer >= dense) for layer in range(layers)], said


SHAPES: tuple[ForeignFlag, ...] = (
    _named("--num-layers", "num_hidden_layers"),
    _named("--mtp-num-layers", "num_nextn_predict_layers", default=0),
    _named("--hidden-size", "hidden_size"),
    _named("--ffn-hidden-size", "intermediate_size"),
    _named("--num-attention-heads", "num_attention_heads"),
    _shape("--group-query-attention", _grouped_queries, "nothing"),
    _named("--num-query-groups", "num_key_value_heads", "num_attention_heads"),
    _shape("--kv-channels", _head_size),
    _named("--vocab-size", "vocab_size"),
    _shape("--swiglu", _activation, "nothing"),
    _shape("--normalization", _norm),
    _named("--norm-epsilon", "rms_norm_eps", "layer_norm_eps"),
    _shape("--qk-layernorm", _family(*QUERY_KEY_NORMS, field="use_qk_norm"), "nothing"),
    _shape("--post-self-attn-layernorm", _family(*SANDWICH_NORMS), "nothing"),
    _shape("--post-mlp-layernorm", _family(*SANDWICH_NORMS), "nothing"),
    _shape("--add-qkv-bias", _family(*BIASED_PROJECTIONS, field="attention_bias"), "nothing"),
    _shape("--disable-bias-linear", _no_biases, "nothing"),
    _shape("--untie-embeddings-and-output-weights", _untied, "nothing"),
    _named("--rotary-base", "rope_theta", "rope_parameters.rope_theta"),
    _named("--rotary-percent", "partial_rotary_factor", "rope_parameters.partial_rotary_factor", default=1.0),
    _shape("--rotary-interleaved", _family(*INTERLEAVED_ROTATIONS), "nothing"),
    _shape("--position-embedding-type", _position_types, only=("rope", "yarn")),
    _named("--rotary-scaling-factor", "rope_scaling.factor", "rope_parameters.factor", default=1.0),
    _named("--mscale", "rope_scaling.mscale", "rope_parameters.mscale", default=1.0),
    _named("--mscale-all-dim", "rope_scaling.mscale_all_dim", "rope_parameters.mscale_all_dim", default=0.0),
    _shape("--multi-latent-attention", _latent, "nothing"),
    _named("--q-lora-rank", "q_lora_rank", default=None),
    _named("--kv-lora-rank", "kv_lora_rank", default=None),
    _named("--qk-head-dim", "qk_nope_head_dim", default=None),
    _named("--qk-pos-emb-head-dim", "qk_rope_head_dim", default=None),
    _named("--v-head-dim", "v_head_dim", default=None),
    _named("--num-experts", *EXPERT_COUNTS, default=0),
    _shape("--moe-ffn-hidden-size", _in_mixture(_field("moe_intermediate_size", "intermediate_size"))),
    _shape("--moe-shared-expert-intermediate-size", _shared_experts),
    _shape("--moe-layer-freq", _layer_kinds),
    _named("--moe-router-topk", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", default=0),
    _named("--moe-router-topk-scaling-factor", "routed_scaling_factor", default=1.0),
    _named("--moe-router-num-groups", "n_group", default=1),
    _named("--moe-router-group-topk", "topk_group", default=1),
    _shape("--moe-router-score-function", _score_function),
    _shape("--moe-router-pre-softmax", _in_mixture(_pre_softmax), "nothing"),
    _shape("--moe-router-enable-expert-bias", _family(*SIGMOID_ROUTERS), "nothing"),
)
