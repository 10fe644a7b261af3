"""Fields of Megatron's configs that need a GPU or Transformer Engine, and are left alone without. Light to import."""

from __future__ import annotations

from collections.abc import Collection, Iterable

FUSIONS = (
    "gradient_accumulation_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "cross_entropy_loss_fusion",
    "persist_layer_norm",
)
"""Fields of the model provider that are always off without Transformer Engine."""

OFFLOADING = (
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_torch_optimizer_for_cpu_offload",
    "pin_cpu_grads",
    "pin_cpu_params",
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Fields of the optimizer: a CPU has nothing to offload to, and torch's AdamW keeps its state in fp32."""

IGNORED_ON_CPU: Collection[str] = {*FUSIONS, *OFFLOADING, "cpu_offloading", "attention_backend", "cp_comm_type"}


def ignored_on_cpu(fields: Iterable[str]) -> list[str]:
    """Select the ``fields`` that have no effect on a CPU."""
    return sorted(name for name in fields if name in IGNORED_ON_CPU)
