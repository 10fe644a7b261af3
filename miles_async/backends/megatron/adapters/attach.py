"""Low-rank adapters (LoRA, DoRA) around layers of a frozen model: add them, run without them, export merged weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.module_matcher import ModuleMatcher
from megatron.bridge.peft.utils import get_adapter_attributes_from_linear, is_expert_linear
from torch import Tensor

from miles_async.arguments.adapters import target_layers
from miles_async.arguments.model import ModelArguments
from miles_async.backends.megatron.adapters.layers import Adapter, DoRALinear, merged_weight
from miles_async.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
    from torch.nn import Module

ADAPTER = ".adapter."  # in the names of an adapter's parameters
_ADAPTED = ".to_wrap"  # in the names of an adapted layer's own parameters


@dataclass
class _Adapters(PEFT, ModuleMatcher):
    """Freezes a model and wraps the layers named ``target_modules``."""

    rank: int = 0
    alpha: float = 0.0
    dora: bool = False

    def transform(self, module: Module, name: str | None = None, prefix: str | None = None) -> Module:
        found = self.match(module, name, prefix)
        if isinstance(module, AdapterWrapper) or found is None:
            return module
        _, path = found
        attributes = get_adapter_attributes_from_linear(module, is_expert=is_expert_linear(path))
        adapter = Adapter(
            attributes.in_features,
            attributes.out_features,
            self.rank,
            base_linear_name=path,
            activation="identity",
            column_init_method="xavier",  # A; B is 0 at first
            input_is_parallel=attributes.input_is_parallel,
            model_parallel_config=module.config,  # type: ignore[arg-type]
            alpha=self.alpha,
            is_expert=is_expert_linear(path),
            disable_tensor_parallel_comm=attributes.disable_tensor_parallel_comm,
            disable_sequence_parallel_comm=attributes.disable_sequence_parallel_comm,
            base_linear_is_parallel=attributes.base_linear_is_parallel,
        )
        wrapper = (DoRALinear if self.dora else LoRALinear)(module, adapter)
        if (norm := getattr(module, "post_layernorm", None)) is not None:  # of the sum of both outputs
            plain: Any = type(module).__base__
            module.forward = partial(plain.forward, module)
            wrapper.register_forward_hook(lambda _, __, output: (norm(output[0]), output[1]))
        return wrapper


def add_adapters(languages: list[Module], model: ModelArguments) -> None:
    """Freeze this rank's loaded language models and adapt the layers of ``--target-modules``, which changes no output
    at first. Raises ConfigurationError if there is no such layer.
    """
    targets = target_layers(model.target_modules)
    add = _Adapters(
        target_modules=list(targets), rank=model.lora_rank, alpha=model.lora_alpha, dora=model.lora_type == "dora"
    )
    add(languages, training=True)
    if not adapted_layers(languages):
        raise ConfigurationError(f"--target-modules: the model has no layer named {' or '.join(targets)}")
    for language in languages:
        if language.pre_process:
            # Recomputed layers get gradients only if their input requires one; a frozen embedding's output does not.
            language.embedding.register_forward_hook(_want_gradient)  # type: ignore[union-attr, operator]


@contextlib.contextmanager
def switched_off(modules: Sequence[Module]) -> Iterator[None]:
    """Run the model without its adapters."""
    wrappers = adapted_layers(modules)
    try:
        for wrapper in wrappers:
            wrapper.disable_adapter_layers()
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()


def merged(tasks: Iterable[WeightConversionTask], modules: Sequence[Module]) -> Iterator[WeightConversionTask]:
    """The conversions of an export of weights with merged adapters, made one at a time."""
    wrappers = {wrapper.to_wrap: wrapper for wrapper in adapted_layers(modules)}
    for task in tasks:
        # By this name the bridge would export the weight and its adapter separately.
        changes: dict[str, Any] = {"global_param_name": task.global_param_name.replace(_ADAPTED, "")}
        wrapper = wrappers.get(task.megatron_module)
        if wrapper is not None and task.param_weight is wrapper.to_wrap.weight:
            changes["param_weight"] = merged_weight(wrapper)
        yield dataclasses.replace(task, **changes)


def adapted_layers(modules: Sequence[Module]) -> list[AdapterWrapper]:
    """Layers of these modules that have an adapter."""
    return [part for module in modules for part in module.modules() if isinstance(part, AdapterWrapper)]


def _want_gradient(_: Module, __: object, output: Tensor) -> None:
    output.requires_grad_()
