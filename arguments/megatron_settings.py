"""``--megatron-X`` as values for Megatron's configs, checked against the fields that the installed version has."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from miles_async.arguments import Arguments
from miles_async.arguments.megatron_fields import FieldValue, MegatronField, megatron_fields
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.model_files import read_config
from miles_async.arguments.pass_through import Collector, unflatten
from miles_async.arguments.problems import refuse
from miles_async.errors import ConfigurationError

WHERE = Collector("model", "megatron_extra")
CLOSE_NAME = 0.8

Values = dict[str, FieldValue | list[FieldValue]]
"""Field → value; dtypes and enumerations by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSettings:
    """Fields that the user sets, by config."""

    provider: Values = field(default_factory=dict)
    optimizer: Values = field(default_factory=dict)
    ddp: Values = field(default_factory=dict)


def megatron_settings(extra: Sequence[str]) -> MegatronSettings:
    """Read ``ModelArguments.megatron_extra``. Raises ConfigurationError naming every flag that cannot be set so."""
    settings = MegatronSettings()
    if not extra:
        return settings
    fields, problems = megatron_fields(), list[str]()
    for flag, words in unflatten({WHERE: extra}):
        name = flag.removeprefix("--megatron-").replace("-", "_")
        if name not in fields:
            problems.append(_unknown(flag, name, fields))
            continue
        try:
            value = fields[name].parse(words)
        except ValueError as error:
            problems.append(f"{flag}: {error}")
            continue
        for config in fields[name].configs:
            getattr(settings, config)[name] = value
    refuse(problems)
    return settings


def _unknown(flag: str, name: str, fields: Mapping[str, MegatronField]) -> str:
    if not fields:
        return f"{flag}: Megatron-core and Megatron-Bridge are not installed here, so it cannot be checked"
    near = difflib.get_close_matches(name, fields, n=1, cutoff=CLOSE_NAME)
    hint = f"did you mean {fields[near[0]].flag}?" if near else "`miles-async train --help-megatron` lists them"
    return f"{flag}: Megatron's configs have no field {name}; {hint}"


def fields_table() -> str:
    """Text of ``--help-megatron``."""
    lines = [
        "Fields of Megatron's configs, by the installed version: --megatron-X VALUE sets one, and a switch needs no",
        "value (--megatron-X false turns it off). --X is taken as --megatron-X unless it is another flag. Several",
        "values are a list. Default as in Megatron's source: Megatron-Bridge chooses others by the model.",
        "",
    ]
    for item in megatron_fields().values():
        if item.owner is None and item.type is not None:
            lines.append(f"{item.flag} {item.type}  (default: {item.default}; {', '.join(item.configs)})")
            lines += [f"    {item.about}"] if item.about else []
    lines += ["", "Not set directly:"]
    for item in megatron_fields().values():
        if item.owner is not None:
            lines.append(f"{item.flag}: {item.owner}")
    return "\n".join(lines) + "\n"


PRECISION_AWARE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Fields of OptimizerConfig that are fp32 without ``use_precision_aware_optimizer``."""


def check_megatron_fields(arguments: Arguments) -> Iterator[str]:
    """Check the fields that --megatron-X sets against the layout of ranks and the other fields."""
    try:
        settings = megatron_settings(arguments.model.megatron_extra)
    except ConfigurationError:
        return  # reported where they are read
    for name, conflicts in _provider_conflicts(arguments.model, settings).items():
        for flag in (flag for flag, given in conflicts.items() if given and settings.provider.get(name)):
            yield f"{_flag(name)} with {flag}: Megatron refuses them together; change one of them"
    if not settings.optimizer.get("use_precision_aware_optimizer"):
        for name in (name for name in PRECISION_AWARE if settings.optimizer.get(name, "fp32") != "fp32"):
            yield f"{_flag(name)} {settings.optimizer[name]}: Megatron needs --use-precision-aware-optimizer with it"
    if arguments.checkpoint.save is not None:
        yield from _unsaveable(settings.optimizer)


def _unsaveable(optimizer: Values) -> Iterator[str]:
    """States of the optimizer of which megatron-core (0.19) writes checkpoints that it cannot load."""
    precision_aware = optimizer.get("use_precision_aware_optimizer")
    if optimizer.get("optimizer_cpu_offload") and not precision_aware:
        yield (
            f"{_flag('optimizer_cpu_offload')} with --save: Megatron cannot load such a checkpoint; "
            "add --use-precision-aware-optimizer"
        )
    if optimizer.get("store_param_remainders") and precision_aware:
        yield (
            f"{_flag('store_param_remainders')} with --save: Megatron saves 16 bits of each fp32 weight as the whole; "
            "leave it out"
        )


def _provider_conflicts(model: ModelArguments, settings: MegatronSettings) -> Mapping[str, Mapping[str, bool]]:
    """Field → flag → whether it is in conflict with the field, as megatron-core (0.19) says in ``__post_init__``."""
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
