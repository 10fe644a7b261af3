"""The model, and its split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config.json names it by family

RecomputeGranularity = Literal["full", "selective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """Model"""

    hf_checkpoint: Path | None = flag(None, "Hugging Face directory: initial weights, config and tokenizer (required)")
    train_backend: str = flag("megatron", "training backend, a name in the entry point group miles_async.backends")
    tensor_model_parallel_size: int = flag(1, "ranks that share each layer's matrices")
    pipeline_model_parallel_size: int = flag(1, "ranks that share the layers")
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of a mixture-of-experts model")
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share each expert's matrices (default: --tensor-model-parallel-size)"
    )
    sequence_parallel: bool = flag(True, "with tensor parallelism, split the sequence outside of attention and MLP too")
    bf16: bool = flag(False, "train in bfloat16 with fp32 main parameters (default: fp32)")
    recompute_granularity: RecomputeGranularity | None = flag(None, "activation recomputation")
    seed: int = flag(1234, "seed of the trainer's random generators")

    @property
    def expert_tensor_size(self) -> int:
        """``--expert-tensor-parallel-size`` in force: megatron's default is that of the dense layers."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size
