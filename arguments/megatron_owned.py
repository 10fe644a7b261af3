"""Fields of Megatron's configs that ``--megatron-X`` does not set, each with the reason and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.specification import flag_specifications

_SHAPE = "the model is built by config.json of --hf-checkpoint: remove it"
_ABSENT = "it is not implemented: remove it"
_PRECISION = "--bf16 chooses the dtypes: use that, or none for fp32"
_EIGHT_BITS = "training in 8 or 4 bits is not implemented: use --bf16"
_ADAM = "AdamW is the optimizer: remove it"
_FSDP = "Megatron-FSDP is not implemented: the distributed optimizer shards what it can; remove it"
_START = "every parameter is loaded from --hf-checkpoint: remove it"
_ALWAYS = "it always is on: remove it"
_PACKED = "samples are packed into micro-batches of different lengths: remove it"

PREFIXES: Mapping[str, str] = {
    "fp8": _EIGHT_BITS,
    "fp4": _EIGHT_BITS,
    "first_last_layers_bf16": _EIGHT_BITS,
    "num_layers_at_": _EIGHT_BITS,
    "muon_": _ADAM,
    "sgd_": _ADAM,
    "loss_scale": _PRECISION,
    "fsdp_": _FSDP,
    "linear_": _SHAPE,
    "mamba_": _SHAPE,
    "dsa_indexer_": _SHAPE,
    "window_": _SHAPE,
    "rope_": _SHAPE,
    "rotary_": _SHAPE,
    "glu_": _SHAPE,
    "inference_": _ALWAYS,
    "cuda_graph": _PACKED,
    "external_cuda_graph": _PACKED,
    "enable_cuda_graph": _PACKED,
    "account_for_": "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
    "virtual_pipeline_": "use --num-virtual-stages-per-pipeline-rank",
    "hierarchical_context_": _ABSENT,
    "pipeline_model_parallel_layout": _ABSENT,
}
"""Beginning of a field's name → reason."""

_BY_REASON: Mapping[str, str] = {
    "use --decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "use --decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "use --enable-mtp-training": "mtp_enabled mtp_standalone",
    "use --grad-norm-limit": "grad_norm_skip_threshold",
    "use --recompute-granularity selective --recompute-modules moe": "moe_layer_recompute",
    "use --use-rollout-routing-replay or --use-routing-replay": "moe_enable_routing_replay",
    "all micro-batches are recomputed alike: use --recompute-granularity":
        "num_microbatches_with_partial_activation_checkpoints",
    "gradients are summed and divided by the tokens that carry loss: remove it": "average_in_collective",
    "the kernels that it needs are not switched on here: remove it": "batch_invariant_mode",
    "it would route other than the engines: remove it":
        "moe_router_force_load_balancing moe_input_jitter_eps moe_token_dropping",
    "tokens reach experts by alltoall: remove it":
        "moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms",
    "it needs a forward pass in parts, which is not implemented: remove it":
        "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release",
    _ABSENT: "hybrid_context_parallel max_seqlen_per_dp_cp_rank moe_extended_tp num_distributed_optimizer_instances "
        "align_param_gather overlap_param_gather_with_optimizer_step cache_mla_latents",
    _PRECISION: "params_dtype pipeline_dtype autocast_dtype enable_autocast initial_loss_scale min_loss_scale "
        "hysteresis",
    _EIGHT_BITS: "moe_router_padding_for_fp8",
    _ALWAYS: "use_distributed_optimizer grad_reduce_in_fp32 parallel_output mtp_detach_heads",
    _FSDP: "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
        "preserve_fp32_weights keep_fp8_transpose_cache suggested_communication_unit_size",
    _START: "perform_initialization use_cpu_initialization init_model_with_meta_device hf_model_id "
        "restore_modelopt_state init_method_std embedding_init_method_std",
    _PACKED: "variable_seq_lengths moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
    _SHAPE: "num_moe_experts layernorm_epsilon layernorm_zero_centered_gamma gated_linear_unit add_bias_linear "
        "qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold softmax_scale softmax_type attention_output_gate "
        "experimental_attention_variant no_rope_freq activation_func_clamp_value "
        "apply_residual_connection_post_layernorm moe_latent_size moe_shared_expert_gate "
        "moe_router_topk_limited_devices moe_apply_probs_on_input share_embeddings_and_output_weights "
        "make_vocab_size_divisible_by should_pad_vocab original_max_position_embeddings beta_fast beta_slow "
        "seq_len_interpolation_factor mrope_section is_hybrid_model heterogeneous_block_specs "
        "hetereogenous_dist_checkpoint scatter_embedding_sequence_parallel",
}  # fmt: skip
"""Reason → names of fields."""

FIELDS = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}


def owner_of(name: str) -> str | None:
    """Why a field is not the user's to set directly; None if it is."""
    if (flag := flag_specifications().get(name)) is not None:
        return f"use {flag.flag}"
    if name in FIELDS:
        return FIELDS[name]
    if (row := FOREIGN_FLAGS.get("--" + name.replace("_", "-"))) is not None:
        return {"checked": _SHAPE, "noted": f"{row.note}: remove it"}.get(row.verdict, row.note)
    return next((reason for prefix, reason in PREFIXES.items() if name.startswith(prefix)), None)
