"""The models of each preset's first ranks of all pipeline stages, with Transformer Engine's layers, on the meta device:
few layers of the model's real shapes, split as the preset says. Parameters must have names in Hugging Face's files, and
the other way round; and the marks of those of plain layers, which CPU runs compare with one rank in numbers.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from miles_async.arguments.model import ModelArguments
from miles_async.arguments.parser import parse_arguments
from miles_async.backends.megatron.platform import Platform
from tests.gpu_contract.stand_ins import stand_in_for_transformer_engine
from tests.unit.arguments.test_model_presets import MODELS, config_of

EVEN_STAGES: dict[str, Any] = {"decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None}
NORMS = ("LayerNorm", "RMSNorm")  # Transformer Engine's have no marks on the meta device until then
LAYERS = 4  # or more, until a model's layers of each kind are among them, and the same number in each stage
LEFT_OUT = ("nemotron-3-nano-30b-a3b", "qwen3-30b-a3b-offload")  # needs mamba-ssm, which gpu.lock lacks; qwen3-30b-a3b
CHECKED = [preset for preset in MODELS if preset not in LEFT_OUT]
MARKS = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "allreduce": True,  # not for experts, whose copies are on other ranks
    "sequence_parallel": False,
    "average_gradients_across_tp_domain": False,
}
"""Attributes of parameters by which Megatron reduces gradients and counts their norm, and what their absence means."""


class OnMeta(TorchFunctionMode):
    """What Megatron and Transformer Engine would put onto a GPU has no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def shortened(model: str, folder: Path, stages: int) -> Path:
    """A directory with the model's config.json, but for LAYERS layers, and as many for each pipeline stage."""
    config = json.loads(config_of(model).read_text())
    language = config.get("text_config", config)
    kinds = language.get("layer_types", [])
    layers = stages * -(-max([LAYERS, *(kinds.index(kind) + 1 for kind in kinds)]) // stages)
    language["num_hidden_layers"] = layers
    if kinds:
        language["layer_types"] = kinds[:layers]
    if "per_layer_config" in language:
        kept = language["per_layer_config"].items()
        language["per_layer_config"] = {layer: values for layer, values in kept if int(layer) < layers}
    (folder / model).mkdir()
    (folder / model / "config.json").write_text(json.dumps(config))
    return folder / model


def file_names(config: Any) -> set[str]:
    """Names of tensors in Hugging Face's files of a model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    return set(revert_weight_conversion(model, model.state_dict()))


def any_expert(names: set[str]) -> set[str]:
    """A rank has some of the experts only."""
    return {re.sub(r"\.experts\.\d+\.", ".experts.N.", name) for name in names}


@contextlib.contextmanager
def one_of(rank: int, world_size: int) -> Iterator[None]:
    """A rank of a group without others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(directory: Path, model: ModelArguments, platform: Platform) -> tuple[Any, Any]:
    """Build the model as a rank does. Returns it with the bridge of its family."""
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from transformers import AutoConfig

    from miles_async.backends.megatron.model import dtypes
    from miles_async.backends.megatron.model.build import make_provider

    config = AutoConfig.from_pretrained(directory)
    bridge = AutoBridge.from_hf_config(config)
    provider = make_provider(bridge, config.to_dict(), model, platform, load_weights=False)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        expert_model_parallel_size=model.expert_model_parallel_size,
        expert_tensor_parallel_size=model.expert_tensor_size,
        create_gloo_process_groups=False,  # the fake backend has no gloo side
    )
    try:
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        with torch.device("meta"), OnMeta():
            module = provider.provide(
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
            with mock.patch("torch.cuda.current_device", return_value=0):
                for part in (part for part in module.modules() if type(part).__name__ in NORMS):
                    part.reset_parameters()
        dtypes.enforce(module, provider.params_dtype)
    finally:
        parallel_state.destroy_model_parallel()
    return module, bridge._model_bridge


def in_files(name: str, bridge: Any) -> frozenset[str]:
    """Names that a tensor of Megatron's has in Hugging Face's files; none if the bridge doesn't know it."""
    if (mapping := bridge.mapping_registry().megatron_to_hf_lookup(name)) is None:
        return frozenset()
    found = mapping.hf_param
    names = [found] if isinstance(found, str) else [*found.values()]
    left_out = getattr(bridge, "_is_synthesized_kv_projection", None)  # Gemma 4: values that are keys
    return frozenset(name for name in names if left_out is None or not left_out(name))


def named(module: Any) -> dict[str, Any]:
    """Parameters and buffers that are saved, with the names that they have in the whole model."""
    from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
    from megatron.bridge.models.conversion.utils import persistent_buffers

    tensors = (*module.named_parameters(), *persistent_buffers(module))
    return {_megatron_local_name_to_global([module], module.config, name, 0): tensor for name, tensor in tensors}


def lost(places: dict[str, frozenset[str]], there: set[str]) -> list[str]:
    """The first tensors that only one side has. ``places``: Megatron's, with their names in files."""
    here = any_expert(set().union(*places.values()))
    return [*(name for name, found in places.items() if not found), *sorted(here ^ any_expert(there))][:5]


def marks(module: Any, bridge: Any) -> dict[str, list[object]]:
    """By names in files. Nobody asks along which dimension a parameter is split that isn't."""
    found = {}
    for name, tensor in named(module).items():
        if not isinstance(tensor, torch.nn.Parameter) or ".indexer." in name:  # frozen
            continue
        has = {mark: getattr(tensor, mark, absent) for mark, absent in MARKS.items()}
        if not has["tensor_model_parallel"]:
            has["partition_dim"] = MARKS["partition_dim"]
        found[" ".join(sorted(in_files(name, bridge)))] = [*has.values()]
    return found


def look(directory: Path, model: ModelArguments, platform: Platform, ranks: int) -> dict[str, Any]:
    """Names on one side only, whether layers are Transformer Engine's, and what is marked otherwise than plain ones."""
    from transformers import AutoConfig

    places: dict[str, frozenset[str]] = {}
    found: dict[str, list[object]] = {}
    plain: dict[str, list[object]] = {}
    fused, there = True, file_names(AutoConfig.from_pretrained(directory))
    stages = model.pipeline_model_parallel_size
    for first in range(0, ranks, ranks // stages):
        with one_of(first, ranks):
            module, bridge = build(directory, model, platform)
            places |= {name: in_files(name, bridge) for name in named(module)}
            found |= marks(module, bridge)
            plain |= marks(*build(directory, model, platform.with_host_layers))
            fused &= any(type(part).__name__.startswith("TE") for part in module.modules())
            if module.share_embeddings_and_output_weights:
                there.discard("lm_head.weight")
    return {
        "lost": lost(places, there),
        "fused": fused,
        "marked otherwise": {name: found.get(name) for name in plain if found.get(name) != plain[name]},
    }


def main(found: Path) -> None:
    stand_in_for_transformer_engine()
    platform = Platform.cuda()
    with mock.patch("torch.cuda.set_device"):
        platform.prepare(0)
    import megatron.core.tensor_parallel.random as megatron_random

    results = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("torch.cuda.current_device", return_value=torch.device("meta")),
        mock.patch("torch.cuda.Stream"),
        mock.patch("torch.cuda.Event"),
        mock.patch("torch.cuda.current_stream"),
        mock.patch.object(megatron_random.CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
    ):
        for preset in CHECKED:
            (model, *_), gpus = MODELS[preset]
            whole = parse_arguments([f"@preset:{preset}"], prog="contract").arguments.model
            directory = shortened(model, Path(folder), whole.pipeline_model_parallel_size)
            try:
                results[preset] = look(directory, replace(whole, **EVEN_STAGES), platform, gpus)
            except Exception as error:  # supervision point: each preset is tried
                import traceback

                traceback.print_exc(limit=-6)
                results[preset] = {"error": f"{type(error).__name__}: {error}"}
    found.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
