"""Refuse layouts and flags that a model's family does not support, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from miles_async.arguments.adapters import MLP, target_layers
from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model import LAYER_PATTERN, ModelArguments, full_attention, num_experts
from miles_async.arguments.model_files import language_fields
from miles_async.backends.megatron.families.hf_config import ahead_layers, family_of
from miles_async.backends.megatron.families.known import FAMILIES, Family
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject

SHARED_EXPERTS = ("n_shared_experts", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
VIRTUAL = "--num-virtual-stages-per-pipeline-rank or --num-layers-per-virtual-pipeline-stage"

LACKS: tuple[tuple[Callable[[Family], bool], Mapping[str, str]], ...] = (
    (
        lambda family: family.linear_attention,
        {
            "--share-prefixes": "the linear attention of model_type {kind!r} reads a sample's tokens one after the "
            "other, so samples can't share positions",
            "--deterministic-mode": "megatron-core 0.19 has no deterministic linear attention (model_type {kind!r}) "
            "of packed sequences",
        },
    ),
    (
        lambda family: family.state_space,
        dict.fromkeys(("--share-prefixes", VIRTUAL), "not there for layers of Mamba-2 ({kind!r})"),
    ),
    (
        lambda family: family.images,
        {
            "--share-prefixes": "samples that begin with equal tokens may have different images (model_type {kind!r})",
            "--overlap-grad-reduce": "a micro-batch without images gives the vision tower no gradients, whose "
            "reduction would never start",
            "--apply-rope-fusion": "the fused rotation of megatron-core 0.19 has one position per token, a model of "
            "model_type {kind!r} has three",
        },
    ),
    (lambda family: not family.images, {"--freeze-vision-tower": "model_type {kind!r} has none"}),
    (
        lambda family: not family.adapters,
        {"--lora-rank": "adapters of model_type {kind!r} were not compared with plain ones"},
    ),
    (
        lambda family: not family.ahead,
        {
            "--enable-mtp-training": "layers for multi-token prediction of model_type {kind!r} were not compared with "
            "plain ones; use a model of " + ", ".join(name for name, family in FAMILIES.items() if family.ahead)
        },
    ),
)
"""Kind of family → unsupported flags → why."""


def check_layout(config: JsonObject, model: ModelArguments, world_size: int) -> None:
    """Check that the model can be split and trained as the flags say. Raises ConfigurationError with every problem."""
    config = language_fields(config)
    if problem := _replica_problem(model, world_size):
        raise ConfigurationError(problem)
    family, kind = family_of(config), config["model_type"]
    given = _given(config, model)
    problems = [*_split_problems(config, model), *_deepstack_problems(config, model)]
    for applies, flags in LACKS:
        if applies(family):
            problems += [f"{name}: {why.format(kind=kind)}; leave it out" for name, why in flags.items() if given[name]]
    if model.enable_mtp_training and family.ahead:
        problems += _ahead_problems(config)
    problems += _expert_problems(config, model, world_size)
    if problems:
        raise ConfigurationError("; ".join(problems))


def _given(config: JsonObject, model: ModelArguments) -> Mapping[str, bool]:
    """Flags of :data:`LACKS` → whether the run has them. Raises ConfigurationError if stages can't be made."""
    settings = megatron_settings(model.megatron_extra)
    pattern = config.get(LAYER_PATTERN)
    layers = config.get("num_hidden_layers") if pattern is None else len(pattern)
    if layers is not None:
        model.stage_layers(layers)
    return {
        VIRTUAL: layers is not None and model.virtual_stages(layers) > 1,
        "--share-prefixes": model.share_prefixes,
        "--lora-rank": bool(model.lora_rank),
        "--enable-mtp-training": model.enable_mtp_training,
        "--freeze-vision-tower": model.freeze_vision_tower,
        "--deterministic-mode": bool(settings.provider.get("deterministic_mode")),
        "--overlap-grad-reduce": bool(settings.ddp.get("overlap_grad_reduce")),
        "--apply-rope-fusion": bool(settings.provider.get("apply_rope_fusion")),
    }


def _replica_problem(model: ModelArguments, world_size: int) -> str | None:
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    if min(sizes) >= 1 and world_size % model.ranks_per_replica == 0:
        return None
    tensor, pipeline, context = sizes
    return (
        f"{world_size} trainer ranks are not a multiple of --tensor-model-parallel-size {tensor} × "
        f"--pipeline-model-parallel-size {pipeline} × --context-parallel-size {context}; change these or "
        "--actor-num-gpus-per-node"
    )


def _split_problems(config: JsonObject, model: ModelArguments) -> Iterator[str]:
    tensor, parts = model.tensor_model_parallel_size, model.tensor_model_parallel_size * model.context_parallel_size
    both = "--tensor-model-parallel-size × --context-parallel-size"
    for flags, divisor, names in (
        ("--tensor-model-parallel-size", tensor, ("num_attention_heads", "intermediate_size", "vocab_size")),
        (both, parts, ("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads")),
    ):
        for name in names:
            if (config.get(name) or 0) % divisor:
                yield f"{flags} {divisor} does not divide {name} {config[name]}"
    heads = config.get("num_key_value_heads")
    whole = full_attention(config)
    for count in (heads, whole and whole[2]):
        if count is not None and count % tensor and tensor % count:
            yield (
                f"--tensor-model-parallel-size {tensor} neither divides num_key_value_heads {count} nor is a multiple "
                "of it"
            )
    if config["model_type"] == "minimax_m2" and heads is not None and tensor > heads:
        yield (
            f"--tensor-model-parallel-size {tensor}: expected at most num_key_value_heads {heads}, as all heads of "
            "keys are normalised together"
        )
    groups = config["n_groups"] if family_of(config).state_space else 0
    if groups % tensor or (groups % parts and parts % groups):
        yield (
            f"--tensor-model-parallel-size {tensor} with --context-parallel-size {model.context_parallel_size} does "
            f"not split n_groups {groups}: the former must divide it, and their product divide it or be a multiple of "
            "it"
        )


def _deepstack_problems(config: JsonObject, model: ModelArguments) -> Iterator[str]:
    deep = len(config.get("vision_config", {}).get("deepstack_visual_indexes") or ())
    layers = config.get("num_hidden_layers")
    if not deep or layers is None:
        return
    first = model.stage_layers(layers)[0] // model.virtual_stages(layers)
    if first < deep:
        yield (
            f"--pipeline-model-parallel-size {model.pipeline_model_parallel_size}: the first (virtual) stage has "
            f"{first} layers; expected {deep} or more, after which features of the vision tower, on that stage, are "
            "added: use fewer stages or --decoder-first-pipeline-num-layers"
        )


def _ahead_problems(config: JsonObject) -> Iterator[str]:
    if not ahead_layers(config):
        yield (
            "--enable-mtp-training: expected a model with layers for multi-token prediction, found no "
            "num_nextn_predict_layers in config.json; leave it out"
        )
    if config.get("tie_word_embeddings"):
        yield "--enable-mtp-training with tie_word_embeddings true: not verified; leave it out"


def _expert_problems(config: JsonObject, model: ModelArguments, world_size: int) -> Iterator[str]:
    expert, expert_tensor = model.expert_model_parallel_size, model.expert_tensor_size
    experts = num_experts(config)
    if not experts:
        if model.splits_experts:
            yield (
                "--expert-model-parallel-size and --expert-tensor-parallel-size are for mixture-of-experts models, "
                f"config.json (model_type {config.get('model_type')!r}) has no experts: leave them out"
            )
        return
    if expert < 1 or experts % expert:
        yield f"--expert-model-parallel-size {expert} does not divide {experts} experts"
        return
    name = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    if (config.get(name) or 0) % expert_tensor:
        yield f"--expert-tensor-parallel-size {expert_tensor} does not divide {name} {config[name]}"
    if expert_tensor > 1 and family_of(config).whole_experts:
        yield (
            f"--expert-tensor-parallel-size {expert_tensor} (by default --tensor-model-parallel-size): megatron-bridge "
            f"0.6 splits experts of model_type {config['model_type']!r} in the wrong places; use 1, with "
            "--expert-model-parallel-size"
        )
    if world_size % (expert_tensor * expert * model.pipeline_model_parallel_size):
        yield (
            f"{world_size} trainer ranks are not a multiple of --expert-tensor-parallel-size {expert_tensor} × "
            f"--expert-model-parallel-size {expert} × --pipeline-model-parallel-size "
            f"{model.pipeline_model_parallel_size}; change these or --actor-num-gpus-per-node"
        )
    if model.lora_rank and expert_tensor > 1 and set(MLP) & set(target_layers(model.target_modules)):
        yield (
            f"--lora-rank with --expert-tensor-parallel-size {expert_tensor}: gradients of the experts' adapters would "
            "be wrong (megatron-bridge 0.6); give --expert-tensor-parallel-size 1 with --expert-model-parallel-size, "
            "or --target-modules without linear_fc1 and linear_fc2"
        )
    split = expert > 1 or expert_tensor != model.tensor_model_parallel_size
    only_experts = set(target_layers(model.target_modules)) <= set(MLP) and not any(map(config.get, SHARED_EXPERTS))
    if model.lora_rank and split and only_experts:
        yield (
            "--target-modules: with adapters on experts alone, which are split over ranks, megatron-core 0.19 has no "
            "optimizer for the rest; add linear_proj, or give --expert-model-parallel-size 1"
        )
    if model.tensor_model_parallel_size > 1 and not model.sequence_parallel:
        yield (
            "megatron trains experts under tensor parallelism only with --sequence-parallel: "
            "remove --no-sequence-parallel or --tensor-model-parallel-size"
        )
