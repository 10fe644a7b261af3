"""Fields of megatron's config that the bridge (0.6) misses or gets wrong.

Without them every logit is wrong, though the export is clean.
"""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments.model import num_experts
from miles_async.arguments.model_files import language_fields
from miles_async.backends.megatron.families.hf_config import family_of, is_latent, mrope, rope_kind, window
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject


def provider_fields(config: JsonObject) -> dict[str, object]:
    """Return field → value. ``config`` has transformers' defaults filled in."""
    config = language_fields(config)
    fields: dict[str, object] = {}
    family = family_of(config)
    if family.rope_per_layer_type:
        fields.update(_gemma_fields(config))
    if config["model_type"] == "gemma4_text":
        fields["global_rotary_percent"] = config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1.0)
    if is_latent(config) and rope_kind(config) == "default":
        fields["rope_type"] = "rope"  # megatron's default is yarn: by a factor of 1, but with other rounding
    if (scalar := config.get("query_pre_attn_scalar")) is not None:
        fields["softmax_scale"] = scalar**-0.5
    if (tokens := window(config)) is not None:
        # Megatron counts the tokens before a token, transformers includes it.
        fields |= {"window_size": (tokens - 1, 0), "cp_comm_type": "a2a"}
        if kinds := config.get("layer_types"):
            fields["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]
    if family.images:
        # A position is three numbers, each of which rotates a part of every head. Transformer Engine's fused rotation
        # of packed sequences (megatron-core 0.19) takes a token's place in its sequence instead.
        section = mrope(config)["mrope_section"]
        pieces = list(_interleaved(section)) if family.interleaved_mrope else section
        fields |= {"mrope_section": pieces, "apply_rope_fusion": False}
    if family.state_space:
        fields |= {"mtp_hybrid_override_pattern": None, "moe_shared_expert_overlap": False}
        if not num_experts(config):
            fields["num_moe_experts"] = None
    if family.unscaled_router:  # softmax over all experts, or over the chosen ones
        fields["moe_router_pre_softmax"] = not config["norm_topk_prob"]
    if config["model_type"] == "gpt_oss":
        fields.update(_gpt_oss_fields(config))
    return fields


def _interleaved(section: list[int]) -> Iterator[int]:
    """Lengths of pieces of half a head that time, height and width rotate in turn; two in three are empty.

    Megatron (0.19) takes the numbers of a position in turn, however many pieces there are.
    """
    for place in range(sum(section)):
        number = place % 3 if place < 3 * section[place % 3] else 0
        yield from (int(number == each) for each in range(3))


def _gpt_oss_fields(config: JsonObject) -> Iterator[tuple[str, object]]:
    """The bridge hard-codes the published models' values, whatever config.json says."""
    yield "activation_func_clamp_value", config["swiglu_limit"]
    if rope_kind(config) != "yarn":
        yield "position_embedding_type", "rope"
        return
    rope = config["rope_parameters"]
    yield "yarn_rotary_scaling_factor", rope["factor"]
    yield "yarn_original_max_position_embeddings", rope["original_max_position_embeddings"]
    yield "yarn_beta_fast", rope.get("beta_fast", 32.0)
    yield "yarn_beta_slow", rope.get("beta_slow", 1.0)
    yield "yarn_mscale", rope.get("mscale")
    yield "yarn_mscale_all_dim", rope.get("mscale_all_dim")
    yield "yarn_correction_range_round_to_int", rope.get("truncate", True)


def _gemma_fields(config: JsonObject) -> Iterator[tuple[str, object]]:
    """The bridge's Gemma 3 and 4 have a rotary base for each kind of layer, identified by layer numbers."""
    kinds = config["layer_types"]
    whole = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    period = whole[0] if whole else len(kinds) + 1
    if whole != list(range(period, len(kinds) + 1, period)):
        raise ConfigurationError(
            f"config.json: layer_types has full_attention in layers {whole}; only every n-th layer is implemented"
        )
    yield "interleaved_attn_pattern", (period - 1, 1)
