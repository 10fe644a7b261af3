"""Write and read adapters as the peft library does: one A and one B for each projection of Hugging Face's model.

Megatron computes some projections as one layer with one adapter: they share its A, and each has some rows of its B. To
learn which rows, the bridge is given row numbers in place of weights and exports them.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.arguments.adapters import PEFT_CONFIG, peft_config
from miles_async.arguments.model import ModelArguments
from miles_async.backends.megatron.adapters.attach import adapted_layers
from miles_async.backends.megatron.adapters.layers import of_all_ranks
from miles_async.backends.megatron.distributed import together
from miles_async.errors import ConfigurationError
from miles_async.runtime.rank_records import gather_records

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from torch.nn import Module

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of peft's names
_RANK_SHIFT = 40  # more bits than a weight has rows
_ADAPTED_WEIGHT = re.compile(r"\.to_wrap\.weight\d*$")
_MOVED = re.compile(r"^model\.layers\.")  # of Qwen2.5-VL's files; transformers' module has another name, as peft's


@dataclass(frozen=True, slots=True)
class _Layer:
    """One adapted layer, or one per expert-parallel rank where experts are split over them."""

    wrapper: AdapterWrapper | None  # None on other pipeline stages
    projections: Sequence[Mapping[str, Tensor]]  # by expert-parallel rank: Hugging Face's name → rows of the layer


def write_adapter(directory: Path, bridge: AutoBridge, modules: list[Module], model: ModelArguments) -> None:
    """Write the adapters of all ranks into ``directory``. Collective. Raises OSError and SafetensorError on rank 0."""
    from safetensors.torch import load, save_file

    tensors: dict[str, Tensor] = {}
    for layer in _layers(bridge, modules):
        parts = ChainMap(*gather_records(_whole(layer.wrapper), dict[int, bytes]))
        if dist.get_rank() > 0:
            continue
        for rank, projections in enumerate(layer.projections):
            part = load(parts[rank])
            for name, rows in projections.items():
                tensors[f"{_PREFIX}{name}.lora_A.weight"] = part["first"].clone()  # safetensors refuses shared memory
                tensors[f"{_PREFIX}{name}.lora_B.weight"] = part["second"][rows]
                if "lengths" in part:
                    tensors[f"{_PREFIX}{name}.lora_magnitude_vector"] = part["lengths"][rows]
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        names = sorted({_module(name).rpartition(".")[2] for name in tensors})
        config = peft_config(model, names, images=_reads_images(bridge))
        (directory / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / WEIGHTS).chmod((directory / PEFT_CONFIG).stat().st_mode)  # safetensors writes with mode 600


@torch.no_grad()
def read_adapter(directory: Path, bridge: AutoBridge, modules: list[Module]) -> None:
    """Load the adapters of ``directory`` into this rank's modules. Collective. Raises ConfigurationError."""
    tensors = _read(directory)
    layers = list(_layers(bridge, modules))
    names = {name for layer in layers for projections in layer.projections for name in projections}
    given = {_module(name) for name in tensors}
    if names != given:
        raise ConfigurationError(
            f"--lora-adapter-path {directory}: expected adapters of the layers that --target-modules names, found "
            + " and ".join(
                f"{what} {len(some)} ({', '.join(sorted(some)[:3])})"
                for what, some in (("none of", names - given), ("others, of", given - names))
                if some
            )
            + ": change --target-modules, or merge the adapter into --hf-checkpoint"
        )
    rank = parallel_state.get_expert_model_parallel_rank()

    def set_all() -> None:
        for layer in layers:
            if layer.wrapper is not None:
                mine = layer.projections[rank if len(layer.projections) > 1 else 0]
                _set(layer.wrapper, mine, tensors, directory)

    together(set_all)


def _read(directory: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"--lora-adapter-path {directory}: cannot read {WEIGHTS}: {error}") from error


def _layers(bridge: AutoBridge, modules: list[Module]) -> Iterator[_Layer]:
    """Every adapted layer of the model, in the same order on all ranks. Collective."""
    wrappers = {wrapper.to_wrap: wrapper for wrapper in adapted_layers(modules)}
    for task in bridge.get_conversion_tasks(modules):
        if _ADAPTED_WEIGHT.search(task.global_param_name):
            wrapper = wrappers.get(task.megatron_module)
            yield _Layer(wrapper, _projections(task, wrapper, images=_reads_images(bridge)))


def _reads_images(bridge: AutoBridge) -> bool:
    return hasattr(bridge.hf_pretrained.config, "vision_config")


def _projections(
    task: WeightConversionTask, wrapper: AdapterWrapper | None, *, images: bool
) -> list[dict[str, Tensor]]:
    numbers = None
    if wrapper is not None:
        rows, group = wrapper.to_wrap.weight.shape[0], wrapper.adapter.linear_in.tp_group
        start = 0 if wrapper.adapter.input_is_parallel else rows * group.rank()
        row_numbers = torch.arange(start, start + rows, device=wrapper.to_wrap.weight.device)
        rank = parallel_state.get_expert_model_parallel_rank() if wrapper.adapter.is_expert else 0
        numbers = row_numbers + (rank << _RANK_SHIFT)  # one dimension, as of a bias: the bridge interprets widths
    found: dict[int, dict[str, Tensor]] = {}
    for name, exported in task.mapping.megatron_to_hf(numbers, task.megatron_module).items():
        found_rank, numbers_there = int(exported[0]) >> _RANK_SHIFT, exported.cpu() & ((1 << _RANK_SHIFT) - 1)
        module = _MOVED.sub("model.language_model.layers.", name) if images else name
        found.setdefault(found_rank, {})[module.removesuffix(".weight")] = numbers_there
    return [found[rank] for rank in sorted(found)]


def _whole(wrapper: AdapterWrapper | None) -> dict[int, bytes]:
    """Expert-parallel rank → A, B and lengths as safetensors, on the first of the ranks that hold the same adapters."""
    from safetensors.torch import save

    if wrapper is None:
        return {}
    adapter = wrapper.adapter
    first, second, lengths = adapter.linear_in.weight.detach(), adapter.linear_out.weight.detach(), adapter.row_lengths
    second = of_all_ranks(second, adapter)
    if adapter.input_is_parallel:
        first = of_all_ranks(first, adapter, dim=1)
    else:
        first = of_all_ranks(first, adapter)
        lengths = None if lengths is None else of_all_ranks(lengths.detach(), adapter)
    expert = adapter.is_expert
    replica = (
        parallel_state.get_expert_data_parallel_rank()
        if expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    if replica or adapter.linear_in.tp_group.rank():
        return {}
    rank = parallel_state.get_expert_model_parallel_rank() if expert else 0
    tensors = {"first": first, "second": second} | ({} if lengths is None else {"lengths": lengths.detach()})
    return {rank: save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})}


def _set(wrapper: AdapterWrapper, rows: Mapping[str, Tensor], tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Copy this rank's parts. Raises ConfigurationError if projections that Megatron computes as one differ in A."""
    adapter = wrapper.adapter
    names = list(rows)
    first, *others = (tensors[f"{_PREFIX}{name}.lora_A.weight"] for name in names)
    if any(not first.equal(other) for other in others):
        raise ConfigurationError(
            f"--lora-adapter-path {directory}: {' and '.join(names)} have an A each, and Megatron computes them as one "
            "layer, with one A: merge the adapter into --hf-checkpoint"
        )

    def joined(kind: str) -> Tensor:
        parts = [tensors[f"{_PREFIX}{name}.{kind}"] for name in names]
        whole = torch.empty(sum(map(len, rows.values())), *parts[0].shape[1:], dtype=parts[0].dtype)
        for numbers, part in zip(rows.values(), parts, strict=True):
            whole[numbers] = part
        return whole

    group = adapter.linear_in.tp_group

    def mine(whole: Tensor, *, columns: bool = False) -> Tensor:
        return whole.chunk(group.size(), dim=int(columns))[group.rank()]

    adapter.linear_in.weight.copy_(mine(first, columns=adapter.input_is_parallel))
    adapter.linear_out.weight.copy_(mine(joined("lora_B.weight")))
    if adapter.row_lengths is not None:
        lengths = joined("lora_magnitude_vector")
        adapter.row_lengths.copy_(lengths if adapter.input_is_parallel else mine(lengths))


def _module(name: str) -> str:
    """The module's name in Hugging Face's model.

    >>> _module("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    'model.layers.0.self_attn.q_proj'
    """
    return re.sub(r"\.(lora_[AB]\.weight|lora_magnitude_vector)$", "", name.removeprefix(_PREFIX))
