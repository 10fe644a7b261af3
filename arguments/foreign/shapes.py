"""Megatron's flags that describe a model. Here config.json of ``--hf-checkpoint`` does: they have to agree with it."""

from __future__ import annotations

from collections.abc import Callable

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, Takes
from miles_async.arguments.model import EXPERT_COUNTS
from miles_async.types import JsonObject

_LATENT = ("deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
_LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # gated delta nets in most layers
SIGMOID_ROUTERS = (*_LATENT, "glm4_moe", "nemotron_h")  # with a bias per expert, by definition of the family
QUERY_KEY_NORMS = (
    *("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3_text", "gemma4_text", "olmoe"),
    *_LINEAR,
    *_LATENT,  # on the latent vectors
)
ZERO_CENTERED_NORMS = ("gemma", "gemma2", "gemma3_text", *_LINEAR)
BIASED_PROJECTIONS = ("qwen2", "qwen2_moe", *_LATENT)  # of latent attention Megatron reads no such flag
GATED_SHARED_EXPERTS = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
WITHOUT_POSITIONS = ("nemotron_h",)
SANDWICH_NORMS = ("glm4", "gemma2", "gemma3", "gemma3_text", "gemma4_text")
ATTENTION_SINKS = ("gpt_oss",)
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


def _of_rope(key: str) -> tuple[str, str]:
    """Where config.json may have a setting of the rotary embedding; transformers 5 writes the second."""
    return f"rope_scaling.{key}", f"rope_parameters.{key}"


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
    if "kv_lora_rank" in config:  # Megatron reads no --kv-channels then; recipes give one of these
        sizes = config.get("qk_nope_head_dim"), config.get("v_head_dim")
        return frozenset(map(str, sizes)), "qk_nope_head_dim {} and v_head_dim {}".format(*sizes)
    if config.get("head_dim") or not (heads and hidden):
        return _field("head_dim")(config)
    return hidden // heads, f"hidden_size {hidden} and num_attention_heads {heads}"


def _grouped_queries(config: JsonObject) -> Said:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return groups not in (None, heads), f"num_attention_heads {heads} and num_key_value_heads {groups}"


def _norm(config: JsonObject) -> Said:
    if config.get("model_type") == "nemotron_h":
        return "RMSNorm", "model_type 'nemotron_h'"
    is_rms = "rms_norm_eps" in config
    return ("RMSNorm" if is_rms else "LayerNorm"), ("" if is_rms else "nothing of ") + "rms_norm_eps"


def _activation(*names: str) -> Callable[[JsonObject], Said]:
    def said(config: JsonObject) -> Said:
        field = "mlp_hidden_act" if "mlp_hidden_act" in config else "hidden_act"
        return config.get(field, "silu") in names, f"{field} {config.get(field, 'silu')!r}"

    return said


_rope_kind = _field(
    *("rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.rope_type", "rope_parameters.type"),
    default="default",
)


def _rotary(config: JsonObject) -> Said:
    kind = config.get("model_type")
    return kind not in WITHOUT_POSITIONS, f"model_type {kind!r}"


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
    if size and count and "moe_shared_expert_intermediate_size" not in config:
        return size * count, f"moe_intermediate_size {size} and n_shared_experts {count}"
    return _field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=None)(config)


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
    if config.get("model_type") in WITHOUT_POSITIONS:
        return frozenset({"none"}), f"model_type {config['model_type']!r}"
    kind = _rope_kind(config)
    return kind and (frozenset(("rope", "yarn") if kind[0] == "yarn" else ("rope",)), kind[1])


def _rope_type(config: JsonObject) -> Said:
    kind = _rope_kind(config)
    return kind and ("yarn" if kind[0] == "yarn" else "rope", kind[1])


def _llama_scaling(config: JsonObject) -> Said:
    kind = _rope_kind(config)
    return kind and (kind[0] == "llama3", kind[1])


def _window(config: JsonObject) -> Said:
    """Values of --window-size, in tokens: Megatron does not count the token itself, config.json and recipes do."""
    size = config.get("sliding_window")
    if not isinstance(size, int) or not config.get("use_sliding_window", True):
        return None, f"sliding_window {size}"
    return frozenset({f"{size},0", f"{size - 1},0"}), f"sliding_window {size}"


def _full_attention(config: JsonObject) -> Said:
    """Every how many layers attention has no window; None if they are not evenly spaced."""
    full = [kind == "full_attention" for kind in config.get("layer_types") or ()]
    first = full.index(True) + 1 if True in full and not all(full) else 0
    even = first and full == [(layer + 1) % first == 0 for layer in range(len(full))]
    return (first if even else None), "layer_types"


def _softmax(config: JsonObject) -> Said:
    kind = config.get("model_type")
    return ("learnable" if kind in ATTENTION_SINKS else "vanilla"), f"model_type {kind!r}"


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
    _shape("--swiglu", _activation("silu", "swish"), "nothing"),
    _shape("--squared-relu", _activation("relu2"), "nothing"),
    _shape("--normalization", _norm),
    _named("--norm-epsilon", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    _shape("--apply-layernorm-1p", _family(*ZERO_CENTERED_NORMS), "nothing"),
    _shape("--use-gated-attention", _family(*_LINEAR), "nothing"),
    _shape("--attention-output-gate", _family(*_LINEAR), "nothing"),
    _named("--linear-attention-freq", "full_attention_interval", default=None),
    _named("--linear-conv-kernel-dim", "linear_conv_kernel_dim", default=None),
    _named("--linear-key-head-dim", "linear_key_head_dim", default=None),
    _named("--linear-value-head-dim", "linear_value_head_dim", default=None),
    _named("--linear-num-key-heads", "linear_num_key_heads", default=None),
    _named("--linear-num-value-heads", "linear_num_value_heads", default=None),
    _named("--mamba-num-heads", "mamba_num_heads", default=None),
    _named("--mamba-head-dim", "mamba_head_dim", default=None),
    _named("--mamba-state-dim", "ssm_state_size", default=None),
    _named("--mamba-num-groups", "n_groups", default=None),
    _shape("--qk-layernorm", _family(*QUERY_KEY_NORMS, field="use_qk_norm"), "nothing"),
    _shape("--post-self-attn-layernorm", _family(*SANDWICH_NORMS), "nothing"),
    _shape("--post-mlp-layernorm", _family(*SANDWICH_NORMS), "nothing"),
    _shape("--add-qkv-bias", _family(*BIASED_PROJECTIONS, field="attention_bias"), "nothing"),
    _shape("--disable-bias-linear", _no_biases, "nothing"),
    _shape("--untie-embeddings-and-output-weights", _untied, "nothing"),
    _named("--rotary-base", "rope_theta", "rope_parameters.rope_theta"),
    _named("--rotary-percent", "partial_rotary_factor", "rope_parameters.partial_rotary_factor", default=1.0),
    _shape("--use-rotary-position-embeddings", _rotary, "nothing"),
    _shape("--rotary-interleaved", _family(*INTERLEAVED_ROTATIONS), "nothing"),
    _shape("--position-embedding-type", _position_types, only=("rope", "yarn", "none")),
    _named("--rotary-scaling-factor", *_of_rope("factor"), default=1.0),
    _shape("--use-rope-scaling", _llama_scaling, "nothing"),
    _named("--rope-scaling-factor", *_of_rope("factor"), default=None),
    _shape("--rope-type", _rope_type, only=("rope", "yarn")),
    _named("--original-max-position-embeddings", *_of_rope("original_max_position_embeddings"), default=None),
    _named("--beta-fast", *_of_rope("beta_fast"), default=32.0),
    _named("--beta-slow", *_of_rope("beta_slow"), default=1.0),
    _named("--mscale", *_of_rope("mscale"), default=1.0),
    _named("--mscale-all-dim", *_of_rope("mscale_all_dim"), default=0.0),
    _shape("--window-size", _window),
    _shape("--window-attn-skip-freq", _full_attention),
    _shape("--softmax-type", _softmax),
    _shape("--multi-latent-attention", _latent, "nothing"),
    _named("--q-lora-rank", "q_lora_rank", default=None),
    _named("--kv-lora-rank", "kv_lora_rank", default=None),
    _named("--qk-head-dim", "qk_nope_head_dim", default=None),
    _named("--qk-pos-emb-head-dim", "qk_rope_head_dim", default=None),
    _named("--v-head-dim", "v_head_dim", default=None),
    _named("--num-experts", *EXPERT_COUNTS, default=0),
    _shape("--moe-ffn-hidden-size", _in_mixture(_field("moe_intermediate_size", "intermediate_size"))),
    _shape("--moe-shared-expert-intermediate-size", _shared_experts),
    _named("--moe-latent-size", "moe_latent_size", default=None),
    _shape("--moe-shared-expert-gate", _family(*GATED_SHARED_EXPERTS), "nothing"),
    _shape("--moe-layer-freq", _layer_kinds),
    _named("--moe-router-topk", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", default=0),
    _named("--moe-router-topk-scaling-factor", "routed_scaling_factor", default=1.0),
    _named("--moe-router-num-groups", "n_group", default=1),
    _named("--moe-router-group-topk", "topk_group", default=1),
    _shape("--moe-router-score-function", _score_function),
    _shape("--moe-router-pre-softmax", _in_mixture(_pre_softmax), "nothing"),
    _shape("--moe-router-enable-expert-bias", _family(*SIGMOID_ROUTERS, field="use_routing_bias"), "nothing"),
)
