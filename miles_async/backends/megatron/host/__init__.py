"""Support for machines without CUDA or Transformer Engine: patches, layers, and fields without effect there.

The rest of the project imports this module only, which is light. :func:`install` runs unmodified megatron-core 0.19 and
megatron-bridge 0.6 without CUDA, and changes no numerics; bugs that matter on every platform are in ``bridge_fixes``.

- ``device_views``     megatron modules see a ``torch`` in which the device "cuda" is the host
- ``patches``          random generators, parameter types, gathers and helpers that assume CUDA or NCCL
- ``gated_delta``      kernels of linear attention
- ``mamba``            kernels of Mamba-2
- ``absent_modules``   transformer_engine and triton, which a few modules import unconditionally
- ``import_hook``      applies these to each megatron module once its body has run
- ``spec``             layers of plain PyTorch, with ``attention``

``tests/integration/test_megatron_compat.py`` fails when upstream no longer needs one of the patches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

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


_installed = False


def install(*, on_cpu: bool) -> None:
    """Make megatron importable, before its first import; idempotent. ``on_cpu``: make it run on the host, too;
    otherwise only modules that a GPU machine may lack get stand-ins.
    """
    global _installed
    if _installed:
        return
    _installed = True

    import torch

    from miles_async.backends.megatron.host import absent_modules, device_views, import_hook, patches

    import_hook.install(
        view=device_views.torch_view() if on_cpu else torch,
        patches=patches.PATCHES if on_cpu else {},
        stand_ins=absent_modules.stand_ins(),
    )
    if on_cpu:
        device_views.patch_cuda_methods()
    # The stand-ins must never make megatron believe that Transformer Engine is there: core decides first.
    import megatron.core
    import megatron.core.extensions.transformer_engine  # noqa: F401


def use_host_layers(provider: Any) -> None:
    """Let a model provider of megatron-bridge build layers without Transformer Engine's."""
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider

    from miles_async.backends.megatron.host.hybrid_spec import host_stack_spec
    from miles_async.backends.megatron.host.spec import host_block_spec

    if isinstance(provider, HybridModelProvider):
        provider.hybrid_stack_spec = host_stack_spec
    else:
        provider.transformer_layer_spec = host_block_spec
