"""Measure the memory of one rank of each pipeline stage, without allocating it.

The rank's real Megatron model, of fake tensors in a fake process group of the full world size, runs forward and
backward on one micro-batch, while bytes of live tensors are counted. No weights are read and there is no other rank: a
layout of 256 ranks takes seconds on a laptop.

Approximations: host layers instead of Transformer Engine's (which keep less between forward and backward where they
fuse), one sequence instead of a packed micro-batch (attention keeps no scores either way), and equal numbers of tokens
per expert (real routing gives some ranks more). The model is built without context parallelism: a rank has ``tokens``
tokens, and what attention receives from other ranks is added by arithmetic.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import megatron.core.tensor_parallel.random as megatron_random
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PretrainedConfig

from miles_async.backends.megatron.adapters.attach import ADAPTER
from miles_async.backends.megatron.families.hf_config import ahead_layers
from miles_async.backends.megatron.memory import kernels
from miles_async.backends.megatron.memory.live_bytes import LiveBytes
from miles_async.backends.megatron.memory.stages import StageMemory, StageRequest
from miles_async.backends.megatron.model import dtypes
from miles_async.backends.megatron.model.build import make_provider, with_adapters
from miles_async.backends.megatron.model.mtp import add_ahead_layers
from miles_async.backends.megatron.model.output import language_model, output_of, return_hidden_states
from miles_async.backends.megatron.model.scores import Scorer
from miles_async.backends.megatron.packing.pack import PackLayout, pack_sequences
from miles_async.backends.megatron.platform import Platform
from miles_async.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron.bridge.models import GPTModelProvider
    from torch.nn import Module

AHEAD_LAYERS = "mtp."
TOWER = "visual."
OUTPUT_LAYER = "output_layer."  # of a GPT model; it has no parameters where the embedding's are on the same stage


def measure_stages(request: StageRequest, platform: Platform) -> list[StageMemory]:
    """Measure a rank of every pipeline stage; among like stages the first, which keeps the most.

    Needs a separate process, since it takes the default process group. Raises ConfigurationError if Megatron cannot
    build the model this way.
    """
    try:
        config = AutoConfig.from_pretrained(request.directory)
        return [_measure(request, platform, config, stages) for stages in _alike(request, platform, config)]
    except (AssertionError, TypeError, ValueError) as error:  # how Megatron rejects a layout for a model
        raise ConfigurationError(f"Megatron cannot build {request.directory / 'config.json'}: {error}") from error


def _alike(request: StageRequest, platform: Platform, config: PretrainedConfig) -> Iterator[range]:
    """Runs of pipeline stages with the same kinds of layers."""
    provider = _provider(request, platform, config)
    remaining, layers = iter(layer_kinds(provider)), request.model.stage_layers(provider.num_layers)
    count, virtual = len(layers), request.model.virtual_stages(provider.num_layers)
    kinds: list[list[object]] = [[stage == 0, stage == count - 1] for stage in range(count)]
    for _ in range(virtual):  # each takes a part of every rank's layers, in the order of ranks
        for kind, share in zip(kinds, layers, strict=True):
            kind += itertools.islice(remaining, share // virtual)
    for _, stages in itertools.groupby(range(count), key=kinds.__getitem__):
        numbers = list(stages)
        yield range(numbers[0], numbers[-1] + 1)


def layer_kinds(provider: GPTModelProvider) -> list[object]:
    """Kind of each layer: a mixture of experts or not, or a letter of a hybrid model's pattern."""
    if pattern := getattr(provider, "hybrid_layer_pattern", None):
        return list(pattern)
    frequency = provider.moe_layer_freq
    if not provider.num_moe_experts:
        return [False] * provider.num_layers
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(provider.num_layers)]
    return [bool(layer) for layer in frequency]


def _provider(request: StageRequest, platform: Platform, config: PretrainedConfig) -> GPTModelProvider:
    bridge = AutoBridge.from_hf_config(config)
    provider = make_provider(bridge, config.to_dict(), request.model, platform, load_weights=False)
    if provider.experimental_attention_variant == "dsa" and request.model.context_parallel_size > 1:
        raise ConfigurationError(
            "--context-parallel-size: memory of sparse attention is planned without it only, since its scores "
            "cover the tokens of all ranks"
        )
    provider.context_parallel_size = 1
    provider.perform_initialization, provider.use_cpu_initialization = False, True
    if provider.num_moe_experts:
        # Every expert takes the mean number of tokens: shapes that don't depend on the router's choice.
        provider.moe_expert_capacity_factor, provider.moe_pad_expert_input_to_capacity = 1.0, True
    return provider


def _measure(request: StageRequest, platform: Platform, config: PretrainedConfig, stages: range) -> StageMemory:
    model, count = request.model, request.model.pipeline_model_parallel_size
    dist.init_process_group(
        "fake", store=FakeStore(), rank=request.world_size // count * stages.start, world_size=request.world_size
    )
    try:
        provider = _provider(request, platform, config)
        virtual = model.virtual_stages(provider.num_layers)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=model.tensor_model_parallel_size,
            pipeline_model_parallel_size=count,
            virtual_pipeline_model_parallel_size=provider.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=model.expert_model_parallel_size,
            expert_tensor_parallel_size=model.expert_tensor_size,
            create_gloo_process_groups=False,  # the fake backend has no gloo side
        )
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        parts = [
            _measure_part(provider, request, config, stages, part if virtual > 1 else None) for part in range(virtual)
        ]
        sizes: Counter[str] = Counter()
        for part in parts:
            sizes.update(part.sizes)
        # Forward passes before the first backward pass, by Megatron's schedules: 1F1B, or interleaved.
        later = count - 1 - stages.start
        return StageMemory(
            stages=stages,
            **sizes,
            kept=max(part.kept for part in parts),
            peak=max(part.peak for part in parts),
            received=(model.context_parallel_size - 1) * request.tokens * _key_value_bytes(provider),
            under_way=1 + later if virtual == 1 else 1 + 2 * later + (virtual - 1) * count,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _key_value_bytes(provider: GPTModelProvider) -> int:
    """Bytes of a token's key and value of one layer, on one tensor-parallel rank."""
    ranks = provider.tensor_model_parallel_size
    if getattr(provider, "multi_latent_attention", False):  # ranks get them uncompressed
        width = provider.qk_head_dim + provider.qk_pos_emb_head_dim + provider.v_head_dim
        elements = provider.num_attention_heads // ranks * width
    else:
        groups = provider.num_query_groups or provider.num_attention_heads
        elements = max(1, groups // ranks) * 2 * provider.kv_channels
    return elements * provider.params_dtype.itemsize


class _Part(NamedTuple):
    """A pipeline stage, or a virtual one."""

    sizes: Mapping[str, int]  # field of StageMemory → elements of parameters
    kept: int
    peak: int


def _measure_part(
    provider: GPTModelProvider,
    request: StageRequest,
    config: PretrainedConfig,
    stages: range,
    virtual_stage: int | None,
) -> _Part:
    count, virtual = request.model.pipeline_model_parallel_size, request.model.virtual_stages(provider.num_layers)
    first = stages.start == 0 and virtual_stage in (None, 0)
    last = stages.stop == count and virtual_stage in (None, virtual - 1)
    with _without_values(), FakeTensorMode(allow_non_fake_inputs=True):
        module = provider.provide(pre_process=first, post_process=last, vp_stage=virtual_stage)
        if last and request.model.enable_mtp_training:
            add_ahead_layers(module, provider, ahead_layers(config.to_dict()), Platform.cpu())
        dtypes.enforce(module, provider.params_dtype)
        if last:
            return_hidden_states(module)
        if request.model.lora_rank:
            with_adapters([module], request.model)
        kept, peak = _forward_backward(module, provider, request, last=last)
        sizes = Counter(parameters=0, expert_parameters=0, value_head=provider.hidden_size if last else 0)
        for name, parameter in module.named_parameters():
            expert = "expert_" if ".experts." in name else ""
            sizes[f"{expert}adapters" if ADAPTER in name else f"{expert}parameters"] += parameter.numel()
            if name.startswith(AHEAD_LAYERS):
                sizes[f"{expert}ahead"] += parameter.numel()
            if name.startswith(TOWER):
                sizes["tower"] += parameter.numel()
            if name.startswith(OUTPUT_LAYER):
                sizes["output_layer"] += parameter.numel()
    return _Part(sizes, kept, peak)


def _forward_backward(
    module: Module, provider: GPTModelProvider, request: StageRequest, *, last: bool
) -> tuple[int, int]:
    """Bytes kept after the forward pass, and at the peak of both passes."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        # As DistributedDataParallel does, which adds a gradient to its buffer and frees it.
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    share = provider.tensor_model_parallel_size if provider.sequence_parallel else 1
    tokens = -(-request.tokens // share) * share
    buffers = [parameter.main_grad for parameter in trained]  # type: ignore[attr-defined]
    with LiveBytes(but=[*module.parameters(), *module.buffers(), *buffers]) as live:
        language = language_model(module)  # images are not counted
        if not module.pre_process:
            hidden = torch.empty(tokens // share, 1, provider.hidden_size, dtype=provider.params_dtype)
            module.set_input_tensor(hidden.requires_grad_())  # type: ignore[operator]
        places = torch.arange(tokens)[None]
        positions = places.expand(3, 1, tokens) if getattr(provider, "mrope_section", None) else places
        output = language(torch.zeros(1, tokens, dtype=torch.long), positions, None)
        loss = _loss(module, output, request) if last else output.sum()
        del output  # as Megatron's schedule does
        kept = live.now
        loss.backward()
    return kept, live.most


def _loss(module: Module, hidden: torch.Tensor, request: StageRequest) -> torch.Tensor:
    """Sum of a loss's inputs: log-probs of all tokens and, if requested, entropy."""
    output = output_of(module, hidden)
    packed = pack_sequences([[0] * len(output.hidden)], PackLayout(), torch.device("cpu"))
    scorer = Scorer(temperature=request.temperature, chunk=request.logprob_chunk)
    loss = scorer(packed, output, entropy=request.entropy)[0].sum()
    return loss + scorer.ahead(packed, output).sum() if output.ahead else loss


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Replace two functions of megatron-core (0.19) that read values, which fake tensors lack, and a conversion that
    swaps tensors in place, which they don't allow.
    """

    def by_one_expert(self: Any, hidden: torch.Tensor, _: object, probs: torch.Tensor) -> object:
        # Sizes are as for all experts with equal numbers of tokens.
        return self.local_experts[0](hidden, probs)

    with (
        mock.patch.object(torch.nn.Module, "bfloat16", _in_bfloat16),
        mock.patch.object(megatron_random.CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
        mock.patch.object(SequentialMLP, "forward", by_one_expert),
        kernels.stand_ins(),
    ):
        yield


def _in_bfloat16(module: Module) -> Module:
    """``Module.bfloat16`` of adapters, with new parameters."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(parameter.detach().bfloat16(), parameter.requires_grad))
    return module
