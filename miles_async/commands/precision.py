"""The default of ``--bf16``, which depends on the device."""

from __future__ import annotations

from dataclasses import replace

from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.model import ModelArguments
from miles_async.runtime.device import choose_device


def with_precision(model: ModelArguments, cluster: ClusterArguments, *, for_gpus: bool = False) -> ModelArguments:
    """Decide ``--bf16`` where no flag does: bf16 on GPUs, as Megatron's recipes train; fp32 on a CPU.

    GPUs are meant if the device is one, if ``--gpu-memory-gb`` says what they have, or ``for_gpus``.
    """
    if model.bf16 is not None:
        return model
    return replace(model, bf16=for_gpus or cluster.gpu_memory_gb is not None or choose_device(cluster.device) == "cuda")
