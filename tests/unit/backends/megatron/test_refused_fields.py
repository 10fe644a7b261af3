"""The installed Megatron refuses what ``arguments/megatron_settings.py`` and ``megatron_owned.py`` say it does."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cpu_offloading": True, "pipeline_model_parallel_size": 2}, "Pipeline parallelism with CPU offloading"),
        ({"cpu_offloading": True, "recompute_granularity": "selective"}, "CPU offloading does not work when"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 4}, "only for layers less than 4"),
        (
            {
                **{"distribute_saved_activations": True, "sequence_parallel": True, "tensor_model_parallel_size": 2},
                **{"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            },
            "false when sequence parallel is enabled",
        ),
        ({"defer_embedding_wgrad_compute": True}, "Cannot defer embedding wgrad compute"),
        ({"delay_wgrad_compute": True}, "overlap_moe_expert_parallel_comm must be enabled"),
        ({"ep_overlap_early_attn_memory_release": True}, "overlap_moe_expert_parallel_comm must be enabled"),
        ({"moe_router_padding_for_fp8": True}, "fp8/fp4 must be specified"),
        ({"batch_invariant_mode": True}, "only supports FlashAttention"),
    ],
)
def test_layouts(fields: dict[str, object], says: str) -> None:
    import torch
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "pipeline_dtype": torch.float32}
    TransformerConfig(**sizes)
    with pytest.raises((ValueError, AssertionError), match=says):
        TransformerConfig(**sizes, **fields)


def test_dtypes_of_the_optimizer() -> None:
    import torch
    from megatron.core.optimizer import OptimizerConfig

    from miles_async.arguments.megatron_settings import PRECISION_AWARE

    for field in PRECISION_AWARE:
        with pytest.raises(AssertionError, match="can only be fp32 when not using precision-aware"):
            OptimizerConfig(use_distributed_optimizer=True, **{field: torch.bfloat16})
