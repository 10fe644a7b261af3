"""The model, and its split over ranks. ``--megatron-X`` sets the field X of Megatron's configs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config.json names it by family


LAYER_PATTERN = "hybrid_override_pattern"
"""Field of Nemotron-H: a letter per layer, M for Mamba-2, * for attention, - for an MLP, E for a mixture."""


def attention_layers(config: JsonObject) -> int:
    """Number of layers with attention; the others of a hybrid model are gated delta nets (Qwen3-Next, Qwen3.5), or
    Mamba-2, MLPs and mixtures (Nemotron-H).

    ``config``: config.json, with ``layer_types`` or as it was published, with an attention every so many layers.
    """
    if pattern := config.get(LAYER_PATTERN):
        return str(pattern).count("*")
    layers = int(config.get("num_hidden_layers") or 0)
    if "linear_num_value_heads" not in config:
        return layers
    if kinds := config.get("layer_types"):
        return layers - list(kinds).count("linear_attention")
    return layers // int(config.get("full_attention_interval") or 4)


def full_attention(config: JsonObject) -> tuple[int, int, int] | None:
    """Gemma 4's layers without a window: (how many, size of their heads, number of heads with keys and values).

    None: the model has no layers whose heads differ. ``config``: config.json as it was published, or as transformers
    5.19 writes it, with ``per_layer_config``.
    """
    if config.get("model_type") != "gemma4_text":
        return None
    size, groups = config.get("global_head_dim", 512), None
    if config.get("attention_k_eq_v"):
        groups = config.get("num_global_key_value_heads")
    if "per_layer_config" in config:
        layer: JsonObject = next(iter((config["per_layer_config"] or {}).values()), {})
        size, groups = layer.get("head_dim", config["head_dim"]), layer.get("num_key_value_heads")
    layers = list(config["layer_types"]).count("full_attention")
    return layers, int(size), int(groups or config["num_key_value_heads"])


def num_experts(config: JsonObject) -> int:
    """Number of routed experts per layer, 0 for a dense model."""
    if "E" not in config.get(LAYER_PATTERN, "E"):
        return 0  # transformers writes a number all the same
    if not config.get("enable_moe_block", True):
        return 0  # Gemma 4, dense
    return next((config[name] for name in EXPERT_COUNTS if config.get(name)), 0)


def experts_per_token(config: JsonObject) -> int | None:
    """Number of experts that a router chooses; None if ``config`` does not say."""
    return config.get("num_experts_per_tok") or config.get("top_k_experts")


LoraType = Literal["lora", "dora"]

ALL_LINEAR = "all-linear"
"""Every layer that can have an adapter, as a word of ``--target-modules``."""

RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]

RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj")
"""Modules that megatron-core 0.19 recomputes by itself, except linear attention's."""

TRANSFORMER_ENGINE_MODULES = ("moe_act", "layernorm", "mla_up_proj")
"""Modules that it recomputes with Transformer Engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """Model"""

    hf_checkpoint: Path | None = flag(None, "Hugging Face directory: initial weights, config and tokenizer (required)")
    trust_remote_code: bool = flag(
        False, "run code that --hf-checkpoint brings for its tokenizer; a note at the start says which files"
    )
    train_backend: str = flag("megatron", "training backend, a name in the entry point group miles_async.backends")
    tensor_model_parallel_size: int = flag(1, "ranks that share each layer's matrices", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "ranks that share the layers", at_least=1)
    context_parallel_size: int = flag(1, "ranks that share the tokens of every sample, for long samples", at_least=1)
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first pipeline stage, if it differs from the other stages", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        "layers of the last pipeline stage, if it differs from the other stages: it computes the logits, too",
        at_least=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of each virtual pipeline stage: a rank holds several stages, which shortens the pipeline's bubble",
        at_least=1,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "virtual pipeline stages per rank, instead of --num-layers-per-virtual-pipeline-stage", at_least=1
    )
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of a mixture-of-experts model", at_least=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share each expert's matrices (default: --tensor-model-parallel-size)", at_least=1
    )
    sequence_parallel: bool = flag(True, "with tensor parallelism, split the sequence outside of attention and MLP too")
    share_prefixes: bool = flag(
        False,
        "with --device cpu: compute common prefixes in a micro-batch once, which saves most of the work if prompts are "
        "long and responses short",
    )
    bf16: bool | None = flag(
        None, "train in bfloat16 with fp32 main parameters, else in fp32 (default: on GPUs yes, on a CPU no)"
    )
    distributed_timeout_minutes: float = flag(
        10.0, "minutes that trainer ranks wait for each other in one collective", metavar="MINUTES", above=0
    )
    recompute_granularity: RecomputeGranularity | None = flag(
        None, "activations that the backward pass recomputes: of whole layers, or of --recompute-modules"
    )
    recompute_method: RecomputeMethod | None = flag(
        None,
        "with --recompute-granularity full. uniform: keep the input of every --recompute-num-layers layers; block: "
        "recompute that many layers of each pipeline stage one by one (default: uniform)",
        needs=("recompute_granularity=full",),
    )
    recompute_num_layers: int | None = flag(
        None, "layers of --recompute-method (default: 1)", needs=("recompute_granularity=full",), at_least=1
    )
    recompute_modules: tuple[str, ...] = flag(
        (),
        f"with --recompute-granularity selective: {', '.join(RECOMPUTE_MODULES)} (default: core_attn)",
        metavar="MODULE",
        needs=("recompute_granularity=selective",),
    )
    lora_rank: int = flag(
        0, "train low-rank adapters of this rank and freeze the model itself (default: none)", at_least=0
    )
    lora_type: LoraType = flag(
        "lora", "lora: W + α/r · B·A; dora: the length of each row is trained, too", needs=("lora_rank",)
    )
    lora_alpha: float = flag(
        16.0, "α of the adapters, which scale the product B·A by α / --lora-rank", needs=("lora_rank",), above=0
    )
    target_modules: tuple[str, ...] = flag(
        (ALL_LINEAR,),
        "layers to adapt, by Megatron's names (linear_qkv, linear_proj, linear_fc1, linear_fc2) or Hugging Face's "
        "(q_proj, k_proj, v_proj, ...)",
        metavar="MODULE",
        needs=("lora_rank",),
    )
    lora_adapter_path: Path | None = flag(
        None,
        "start from this adapter, a directory of the peft library's files (default: from adapters that add nothing)",
        needs=("lora_rank",),
    )
    freeze_vision_tower: bool = flag(
        False, "freeze the vision tower of a model that reads images, and its projection to the language model"
    )
    enable_mtp_training: bool = flag(
        False,
        "train the model's layers for multi-token prediction to predict what the policy samples; the policy gets no "
        "gradient from them",
    )
    mtp_loss_scaling_factor: float = flag(
        0.2,
        "with --enable-mtp-training: weight of the layers' loss, the cross entropy of the tokens that carry loss",
        needs=("enable_mtp_training",),
        above=0,
    )
    seed: int = flag(1234, "seed of the trainer's random generators", at_least=0)
    megatron_extra: tuple[str, ...] = ()  # collected from --megatron-*, as fields of Megatron's configs

    @property
    def directory(self) -> Path:
        """``--hf-checkpoint``, which every run has."""
        assert self.hf_checkpoint is not None
        return self.hf_checkpoint

    @property
    def splits_experts(self) -> bool:
        """True if flags split experts, which dense models don't have; 1 is what recipes of dense models say, too."""
        return self.expert_model_parallel_size > 1 or (self.expert_tensor_parallel_size or 1) > 1

    @property
    def ranks_per_replica(self) -> int:
        """Trainer ranks that hold one copy of the weights and work on one micro-batch."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """``--expert-tensor-parallel-size`` in force: megatron's default is the dense layers' size."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def stage_layers(self, layers: int) -> list[int]:
        """Share ``layers`` of a model out over pipeline stages. Raises ConfigurationError naming the flags.

        >>> ModelArguments(pipeline_model_parallel_size=4, decoder_last_pipeline_num_layers=13).stage_layers(61)
        [16, 16, 16, 13]
        """
        stages = self.pipeline_model_parallel_size
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        given = "".join(
            f", --decoder-{name}-pipeline-num-layers {count}"
            for name, count in (("first", first), ("last", last))
            if count is not None
        )
        if given and stages == 1:
            raise ConfigurationError(f"{given[2:]} without --pipeline-model-parallel-size: there is one stage only")
        middle = stages - (first is not None) - (last is not None)
        left = layers - (first or 0) - (last or 0)
        if left < middle or (left % middle if middle else left):
            raise ConfigurationError(
                f"--pipeline-model-parallel-size {stages}{given} does not divide num_hidden_layers {layers}: {left} "
                f"layers are left for {middle} stages of equal size; --decoder-first-pipeline-num-layers and "
                "--decoder-last-pipeline-num-layers make the first and the last stage differ"
            )
        shares = [left // middle] * middle if middle else []
        return [*([first] if first is not None else []), *shares, *([last] if last is not None else [])]

    def virtual_stages(self, layers: int) -> int:
        """Virtual pipeline stages on every rank, 1 if there are none. Raises ConfigurationError naming the flags.

        >>> ModelArguments(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=2).virtual_stages(32)
        4
        """
        size, count = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
        if size is None and count is None:
            return 1
        given = (
            f"--num-layers-per-virtual-pipeline-stage {size}"
            if size is not None
            else f"--num-virtual-stages-per-pipeline-rank {count}"
        )
        if size is not None and count is not None:
            raise ConfigurationError(f"{given} with --num-virtual-stages-per-pipeline-rank: give one of them")
        if self.pipeline_model_parallel_size == 1:
            raise ConfigurationError(f"{given} without --pipeline-model-parallel-size: there is one stage only")
        shares = self.stage_layers(layers)
        if any(share % (size or count or 1) for share in shares):
            raise ConfigurationError(f"{given} does not divide the layers of a pipeline rank: {sorted(set(shares))}")
        if size is not None and len(set(shares)) > 1:
            raise ConfigurationError(
                f"{given} with pipeline ranks of {sorted(set(shares))} layers: give "
                "--num-virtual-stages-per-pipeline-rank"
            )
        return count if count is not None else shares[0] // (size or 1)
