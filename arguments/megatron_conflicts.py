"""Check fields of Megatron's configs that it refuses beside other flags; it does so in ranks, after the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from miles_async.arguments import Arguments
from miles_async.arguments.megatron_settings import MegatronSettings, megatron_settings
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.model_files import read_config
from miles_async.errors import ConfigurationError

PRECISION_AWARE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Fields of OptimizerConfig that are fp32 without ``use_precision_aware_optimizer``."""


def check_megatron_fields(arguments: Arguments) -> Iterator[str]:
    """Check the fields that --megatron-X sets against the layout of ranks and the other fields."""
    try:
        settings = megatron_settings(arguments.model.megatron_extra)
    except ConfigurationError:
        return  # reported where they are read
    for field, conflicts in _provider_conflicts(arguments.model, settings).items():
        for flag in (flag for flag, given in conflicts.items() if given and settings.provider.get(field)):
            yield f"{_flag(field)} with {flag}: Megatron refuses them together; change one of them"
    if not settings.optimizer.get("use_precision_aware_optimizer"):
        for field in (name for name in PRECISION_AWARE if settings.optimizer.get(name, "fp32") != "fp32"):
            yield f"{_flag(field)} {settings.optimizer[field]}: Megatron needs --use-precision-aware-optimizer with it"


def _provider_conflicts(model: ModelArguments, settings: MegatronSettings) -> Mapping[str, Mapping[str, bool]]:
    """Field → flag → whether it is in conflict with the field, as megatron-core (0.16) says in ``__post_init__``."""
    stages = f"--pipeline-model-parallel-size {model.pipeline_model_parallel_size}"
    recomputes = f"--recompute-granularity {model.recompute_granularity}"
    splits_sequence = model.sequence_parallel and model.tensor_model_parallel_size > 1
    layers = read_config(model.hf_checkpoint).get("num_hidden_layers") if model.hf_checkpoint else None
    offloaded = settings.provider.get("cpu_offloading_num_layers", 0)
    return {
        "cpu_offloading": {
            stages: model.pipeline_model_parallel_size > 1,
            recomputes: model.recompute_granularity is not None,
            f"{_flag('cpu_offloading_num_layers')} {offloaded} of {layers} layers": isinstance(layers, int)
            and not 0 <= int(str(offloaded)) < layers,
        },
        "distribute_saved_activations": {
            f"{recomputes} and --sequence-parallel": model.recompute_granularity is not None and splits_sequence
        },
        "defer_embedding_wgrad_compute": {stages: model.pipeline_model_parallel_size == 1},
    }


def _flag(field: str) -> str:
    return f"--megatron-{field.replace('_', '-')}"
