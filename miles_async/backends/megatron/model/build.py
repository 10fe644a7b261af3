"""Build the megatron model from a Hugging Face checkpoint through megatron-bridge."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_model_config
from torch import Tensor

from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.model_files import language_fields
from miles_async.backends.megatron import host, overrides
from miles_async.backends.megatron.adapters.attach import add_adapters, merged, switched_off
from miles_async.backends.megatron.adapters.files import read_adapter
from miles_async.backends.megatron.families import (
    coverage,
    deepseek_v32_bridge,  # noqa: F401  # registers itself
    gemma4_bridge,  # noqa: F401  # registers itself
    glm4_bridge,  # noqa: F401  # registers itself
    hf_config,
    qwen_vl,  # noqa: F401  # registers itself
)
from miles_async.backends.megatron.families.float8_files import read_as_floats
from miles_async.backends.megatron.families.hf_config import ahead_layers
from miles_async.backends.megatron.families.provider_fields import provider_fields
from miles_async.backends.megatron.model import dtypes
from miles_async.backends.megatron.model.forward import Pipeline
from miles_async.backends.megatron.model.fusions import default_fusions
from miles_async.backends.megatron.model.mtp import add_ahead_layers, share_embedding
from miles_async.backends.megatron.model.output import add_value_heads, language_model, return_hidden_states
from miles_async.backends.megatron.packing import shared_prefixes
from miles_async.backends.megatron.packing.pack import PackLayout, pack_filler
from miles_async.backends.megatron.packing.routing_replay import Routers, RoutingLayout
from miles_async.backends.megatron.platform import Platform
from miles_async.runtime.picture_processor import PictureProcessor, load_picture_processor
from miles_async.types import JsonObject

if TYPE_CHECKING:
    from megatron.bridge.models import GPTModelProvider
    from torch.nn import Module


_LOCK_DIRECTORY = "MEGATRON_CONFIG_LOCK_DIR"
COPIES = {"model.embed_tokens.weight": ".embed_tokens.weight", "lm_head.weight": ".shared_head.head.weight"}
"""Tensor of the model → ending of its copies in layers for multi-token prediction."""
COPY = re.compile(r"\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$")
"""Name of such a copy."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A megatron model (one module per virtual pipeline stage) and the bridge that built it."""

    modules: list[Module]
    bridge: AutoBridge
    adapted: bool = False  # only adapters are trained
    share_prefixes: bool = False
    ahead: bool = False  # layers for multi-token prediction are trained
    pictures: PictureProcessor | None = None  # None: it reads no images

    @property
    def pack_layout(self) -> PackLayout:
        """How sequences are packed for this rank."""
        config = get_model_config(self.modules[0])
        share = config.tensor_model_parallel_size if config.sequence_parallel else 1
        routing = None
        if config.moe_enable_routing_replay:
            routing = RoutingLayout(
                layers=tuple(layer for routers in self.routers.values() for layer in routers.replays),
                topk=config.moe_router_topk,
                experts=config.num_moe_experts,
                share=share,
                share_rank=parallel_state.get_tensor_model_parallel_rank() % share,
            )
        return PackLayout(
            share=share,
            context_size=parallel_state.get_context_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            share_prefixes=self.share_prefixes,
            routing=routing,
            pictures=self.pictures,
        )

    @property
    def routers(self) -> dict[Module, Routers]:
        """Routers with replayed choices, by module that has any."""
        routers = {module: Routers.of(module) for module in self.modules}
        return {module: found for module, found in routers.items() if found.replays}

    def pipeline(self, device: torch.device) -> Pipeline:
        """The part of the model on this rank, ready to run."""
        pipeline = Pipeline(self.modules, pack_filler(self.pack_layout, device), self.routers)
        return replace(pipeline, before_training=partial(share_embedding, self.modules)) if self.ahead else pipeline

    def without_adapters(self, device: torch.device) -> Pipeline:
        """The same part of the model without adapters and without replayed routing."""
        return replace(self.pipeline(device), routers={}, inside=partial(switched_off, self.modules))

    def exported(self, *, to_save: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, in a fixed order, with adapters merged. Collective.

        ``to_save``: on the host, and with trained layers for multi-token prediction, which engines don't hold.
        """
        tasks = self.bridge.get_conversion_tasks(self.modules)
        if self.ahead and not to_save:
            tasks = [task for task in tasks if not task.global_param_name.startswith("mtp.")]
        tensors: Iterator[tuple[str, Tensor]] = self.bridge.export_hf_weights(
            self.modules,
            cpu=to_save,
            show_progress=False,
            conversion_tasks=merged(tasks, self.modules) if self.adapted else tasks,
            merge_adapter_weights=False,  # the bridge (0.6) knows neither DoRA nor adapters of single experts
        )
        # For GLM-4.7-Flash the bridge repeats two tensors for these layers.
        return tensors if to_save else ((name, tensor) for name, tensor in tensors if not COPY.search(name))

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the exported tensors, then tensors of the checkpoint that the model does not hold, unchanged: layers
        for multi-token prediction that are not trained. Their copies of embedding and output layer are always the
        model's. Collective; every rank gets all tensors.
        """
        source = self.bridge.hf_pretrained.state.source
        left = set(source.get_all_keys())
        for name, tensor in self.exported(to_save=True):
            left.discard(name)
            yield name, tensor
            for copy in sorted(each for each in left if name in COPIES and each.endswith(COPIES[name])):
                left.discard(copy)
                yield copy, tensor.clone()
        for name in sorted(left):
            yield from source.load_tensors([name]).items()

    @property
    def tied(self) -> bool:
        """True if the output layer shares the embedding's weights."""
        return bool(get_model_config(self.modules[0]).share_embeddings_and_output_weights)


def load_model(
    directory: Path,
    model: ModelArguments,
    platform: Platform,
    *,
    trainable: bool,
    replays_routing: bool = False,
    value_head: bool = False,
) -> LoadedModel:
    """Load the model onto this rank's device. Collective. Raises ConfigurationError for what would be trained wrongly.

    ``trainable``: wrap it in DistributedDataParallel with a distributed optimizer's buffers; else it is frozen.
    ``replays_routing``: its routers can be given their choices. ``value_head``: it computes values instead of logits.
    """
    written = hf_config.read_config(directory)
    hf_config.check_model(written, directory)
    with _config_locks():
        bridge = AutoBridge.from_hf_pretrained(str(directory))
        config = bridge.hf_pretrained.config.to_dict()  # with transformers' defaults
    hf_config.check_model({**written, **config}, directory)
    if quantization := language_fields(written).get("quantization_config"):
        dtype = torch.bfloat16 if model.bf16 else torch.float32
        read_as_floats(bridge.hf_pretrained.state.source, quantization, dtype)
    provider = make_provider(bridge, config, model, platform, load_weights=True)
    if replays_routing:
        provider.moe_enable_routing_replay, provider.moe_router_fusion = True, False  # fused, it can't

    adapted = trainable and model.lora_rank > 0
    ahead = ahead_layers(config) if trainable and not value_head and model.enable_mtp_training else 0

    def prepare(modules: list[Module]) -> list[Module]:
        for module in modules:
            if ahead and module.post_process:
                add_ahead_layers(module, provider, ahead, platform)
            dtypes.enforce(module, provider.params_dtype)
            freeze_indexers(module)
            if module.post_process:
                return_hidden_states(module)
        coverage.check(bridge, modules)
        return modules

    def add(modules: list[Module]) -> list[Module]:
        """Add what the checkpoint does not have."""
        if adapted:
            with_adapters(modules, model)
            if model.lora_adapter_path is not None:
                read_adapter(model.lora_adapter_path, bridge, modules)
        if value_head:
            add_value_heads(modules)
        return modules

    provider.register_pre_wrap_hook(prepare, prepend=True)  # before the bridge's hook, which loads the weights
    provider.register_pre_wrap_hook(add)  # after it
    if not parallel_state.is_initialized():
        # Megatron (0.19) gives its groups 30 minutes otherwise, whatever the default group has.
        provider.initialize_model_parallel(
            seed=model.seed, distributed_timeout_minutes=model.distributed_timeout_minutes
        )
    settings = megatron_settings(model.megatron_extra)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, **overrides.config_values(settings.ddp, platform)
    )
    modules = provider.provide_distributed_model(
        ddp_config=ddp if trainable else None,
        wrap_with_ddp=trainable,
        # Every rank reads the same checkpoint: there is nothing to broadcast.
        data_parallel_random_init=False,
        use_cpu_initialization=platform.device == "cpu",
        bf16=model.bf16,
        mixed_precision_wrapper=dtypes.MixedPrecision,
    )
    if trainable:
        config_of_model = get_model_config(modules[0])
        config_of_model.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:  # only the last micro-batch's gradients are reduced
            pauses = [module.no_sync for module in modules]
            config_of_model.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    for module in modules:
        module.train(trainable)
        if not trainable:
            module.requires_grad_(False)
        if model.share_prefixes:
            shared_prefixes.check_module(module)
    pictures = load_picture_processor(directory) if hf_config.family_of(config).images else None
    return LoadedModel(modules, bridge, adapted, model.share_prefixes, ahead > 0, pictures)


def freeze_indexers(module: Module) -> None:
    """Exclude sparse attention's indexers from training: their choice of tokens passes no gradient of the policy."""
    for name, part in module.named_modules():
        if name.endswith(".core_attention.indexer"):
            part.requires_grad_(False)


def with_adapters(modules: list[Module], model: ModelArguments) -> None:
    """Adapt the language model, and freeze all else. Raises as ``add_adapters`` does."""
    add_adapters([language_model(module.requires_grad_(False)) for module in modules], model)


@contextmanager
def _config_locks() -> Iterator[None]:
    """Keep Megatron-Bridge's locks of config.json out of HOME, where perhaps nothing can be written."""
    if os.environ.get(_LOCK_DIRECTORY):
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        os.environ[_LOCK_DIRECTORY] = directory
        try:
            yield
        finally:
            del os.environ[_LOCK_DIRECTORY]


def make_provider(
    bridge: AutoBridge, config: JsonObject, model: ModelArguments, platform: Platform, *, load_weights: bool
) -> GPTModelProvider:
    """Return the provider that builds this rank's modules. ``config``: config.json with transformers' defaults."""
    if hf_config.family_of(config).host_layers:
        platform = platform.with_host_layers
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    for name, value in provider_fields(config).items():
        setattr(provider, name, value)
    # The bridge (0.6) skips initialisation, as the weights are loaded anyway; but only initialisation marks
    # parameters as tensor-parallel, and without the marks the gradient norm counts tensor rank 0's shards alone.
    provider.perform_initialization = True
    if not platform.transformer_engine:
        host.use_host_layers(provider)
    provider.tensor_model_parallel_size = model.tensor_model_parallel_size
    provider.context_parallel_size = model.context_parallel_size
    provider.pipeline_model_parallel_size = model.pipeline_model_parallel_size
    virtual_stages = model.virtual_stages(provider.num_layers)
    if virtual_stages > 1:
        provider.virtual_pipeline_model_parallel_size = virtual_stages
        # Two stages of a rank may exchange tensors with the same rank at once; batched, these would be mixed up.
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
    provider.num_layers_in_first_pipeline_stage = model.decoder_first_pipeline_num_layers
    provider.num_layers_in_last_pipeline_stage = model.decoder_last_pipeline_num_layers
    provider.expert_model_parallel_size = model.expert_model_parallel_size
    provider.expert_tensor_parallel_size = model.expert_tensor_size
    provider.sequence_parallel = model.sequence_parallel and model.tensor_model_parallel_size > 1
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
    provider.bf16, provider.fp16 = model.bf16, False
    provider.attention_backend = AttnBackend.auto  # Gemma's choice suits an old Transformer Engine
    settings = megatron_settings(model.megatron_extra).provider
    values = overrides.config_values(settings, platform)
    if platform.transformer_engine:
        values = {**default_fusions(provider), **values}
    else:
        values |= dict.fromkeys(host.FUSIONS, False)
    for name, value in values.items():
        setattr(provider, name, value)
    # The loss is a sum over tokens; finalize_model_grads divides by all ranks' loss tokens (token mean).
    provider.calculate_per_token_loss = True
    provider.variable_seq_lengths = True  # packed micro-batches differ in length
    # Micro-batches differ in length, which "allgather" does not take; "flex" (DeepEP) was never run here.
    provider.moe_token_dispatcher_type = "alltoall"
    provider.moe_router_dtype = "fp32"  # engines route in fp32 too, and rounding would choose other experts
    if provider.moe_router_enable_expert_bias:
        provider.moe_router_score_function = "sigmoid"  # in transformers by definition, so config.json may omit it
    # The policy gradient alone moves the weights: no balancing loss, no drift of router biases, no extra layers.
    provider.moe_router_load_balancing_type = "none"
    provider.moe_aux_loss_coeff = 0.0
    provider.moe_z_loss_coeff = None
    provider.moe_router_bias_update_rate = 0.0
    provider.dsa_indexer_loss_coeff = 0.0  # sparse attention's choice of tokens
    provider.mtp_num_layers = None
    if model.freeze_vision_tower:
        provider.freeze_vision_model = provider.freeze_vision_projection = True
    if model.lora_rank:
        provider.moe_grouped_gemm = False  # experts of a grouped product would share one adapter
    provider.recompute_granularity = model.recompute_granularity
    if model.recompute_granularity == "full":
        provider.recompute_method = model.recompute_method or "uniform"
        provider.recompute_num_layers = model.recompute_num_layers or 1
    elif model.recompute_modules:
        provider.recompute_modules = list(model.recompute_modules)
    provider.finalize()
    return provider
